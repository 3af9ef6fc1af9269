"""The section on training speed and memory: recipes beside bf16, and the memory accounted for from what each keeps."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from lsai_core.config import Fp8Config, ModelConfig, TrainConfig
from lsai_core.shapes import parameters_in
from lsai_core.training.precision import weight_dtype
from lsai_lab.kit.style import PALETTE
from lsai_lab.report.fp8.products import block_times
from lsai_lab.report.fp8.results import Fp8Results
from lsai_lab.report.show import run_link, show_figure, show_table, show_text
from lsai_lab.report.variants import sittings

GIB = 2**30
OWN = ("fused", "tensorwise")  # this project's recipes


def show_training(results: Fp8Results) -> None:
    """Table, figure and account of one machine; nothing if no recipe was tried there."""
    rows, config = results.speed, results.config("speed")
    if rows.empty or config is None:
        return
    model = config.model
    source = next((s for s in rows["peak_source"] if isinstance(s, str)), "")
    table = pd.DataFrame(
        {
            "recipe": rows["label"],
            "key": rows["key"],
            "tokens/s": rows["tokens_per_s"],
            "speed-up": rows["speedup"],
            "step (ms)": rows["step_ms"],
            "quartiles": [
                f"{low:,.4g} to {high:,.4g}" if low == low else None
                for low, high in zip(rows["step_ms_p25"], rows["step_ms_p75"], strict=True)
            ],
            "MFU (%)": rows["mfu"] * 100,
            "peak (GiB)": rows["peak_gib"],
            "against bf16": [
                more(gib) if gib == gib and name != results.study.baseline else None
                for name, gib in zip(rows["variant"], rows["more_gib"], strict=True)
            ],
            "first step (s)": rows["first_step_s"],
            "outcome": rows["outcome"],
        }
    )
    drop = [c for c in ("speed-up", "MFU (%)", "peak (GiB)", "against bf16") if not table[c].notna().any()]
    if (rows["outcome"] == "ok").all():
        drop.append("outcome")
    gib = ".2f" if rows["peak_gib"].max() >= 1 else ".3f"
    formats = {"tokens/s": "{:,.0f}", "speed-up": "{:.2f}x", "step (ms)": "{:,.4g}", "MFU (%)": ".1f"}
    formats |= {"peak (GiB)": gib, "first step (s)": ".1f"}
    parameters = rows["parameters"].max()
    shape = f"{model.preset}, {model.n_layers} layers, {parameters / 1e6:,.4g} M parameters"
    compiled = "blocks compiled (the first step includes that)" if config.compile else "not compiled"
    show_table(
        table.drop(columns=drop),
        f"tbl-fp8-training-{results.slug}",
        f"Training on {results.machine}: {shape}, {config.batch_size} x {config.seq_len} tokens a step, {config.precision}, {compiled}, "
        f"median step. MFU against {source}."
        + (" There is no bf16 run of this part to compare with." if "speed-up" in drop else ""),
        formats={name: spec for name, spec in formats.items() if name not in drop},
        links={"recipe": "key"},
    )
    if (rows["outcome"] == "ok").sum() > 1 and rows["speedup"].notna().any():
        show_figure(
            _figure(rows[rows["outcome"] == "ok"]),
            f"fig-fp8-training-{results.slug}",
            f"Speed and peak memory of each recipe beside bf16 on {results.machine} ({shape}).",
        )
    apart = sittings(results.of_part("speed"))
    sentences = [*_predicted(results, config), *memory_account(rows, config), *filter(None, [apart])]
    show_text("\n".join(f"- {sentence}" for sentence in sentences))


def more(gib: float) -> str:
    """A difference in memory with its sign, in a unit in which it can be read."""
    return f"{gib:+.2f} GiB" if abs(gib) >= 0.1 else f"{gib * 1024:+.1f} MiB"


def size_of(gib: float) -> str:
    """An amount of memory in a unit in which it can be read."""
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.2g} MiB"


def _figure(rows: pd.DataFrame) -> Figure:
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.3, 0.9 + 0.32 * len(rows)), sharey=True)
    style = {"edgecolor": "#222222", "linewidth": 0.6}
    left.barh(rows["label"], rows["tokens_per_s"] / 1e3, color=PALETTE[0], **style)
    for value, label, ratio in zip(rows["tokens_per_s"] / 1e3, rows["label"], rows["speedup"], strict=True):
        left.annotate(
            f"{ratio:.2f}x", (value, label), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    left.set(xlabel="thousand tokens per second", xlim=(0, rows["tokens_per_s"].max() / 1e3 * 1.2))
    peak = rows["peak_gib"].fillna(0)
    right.barh(rows["label"], peak, color=PALETTE[1], hatch="///", **style)
    for value, label in zip(peak, rows["label"], strict=True):
        right.annotate(
            f"{value:.3g}", (value, label), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    right.set(xlabel="peak memory (GiB)", xlim=(0, max(peak.max(), 1e-3) * 1.2))
    left.invert_yaxis()
    return fig


def _predicted(results: Fp8Results, config: TrainConfig) -> list[str]:
    """The speed-up that the measured products alone imply, beside those that this project's recipes reach."""
    rows, points, tokens = results.speed, results.points, config.batch_size * config.seq_len
    own = rows[rows["variant"].isin(OWN) & (rows["outcome"] == "ok") & rows["speedup"].notna()]
    base = rows[(rows["variant"] == results.study.baseline) & (rows["outcome"] == "ok")]
    same = results.gemm is not None and results.gemm.config["model"] == config.model.model_dump(mode="json")
    if (
        own.empty
        or base.empty
        or not same
        or config.fp8.layers != Fp8Config().layers
        or config.grad_checkpoint != "none"
    ):
        return []
    block = block_times(points, tokens)
    if not {"bf16", "fp8_casts"} <= set(block.dropna().index):
        return []
    step, layers = base["step_ms"].iloc[0], config.model.n_layers
    ideal, saved = layers * (block["bf16"] - block["fp8"]), layers * (block["bf16"] - block["fp8_casts"])
    reached = " and ".join(f"{row.speedup:.2f} ({run_link(row.label, row.key)})" for row in own.itertuples())
    return [
        f"*What the products promise:* of the {step:,.0f} ms of a bf16 step, {layers * block['bf16'] / step:.0%} are the products "
        f"that fp8 replaces. Bare products would save {ideal:,.0f} ms (a speed-up of {step / (step - ideal):.2f}), with every cast "
        f"in passes of its own, as measured, {saved:,.0f} ms ({step / (step - saved):.2f}); this project's recipes reach {reached}."
    ]


def kept_inputs(model: ModelConfig) -> dict[str, int]:
    """Bytes per token that a block with fused kernels keeps as inputs of matrix products, beyond what it keeps anyway.

    The attention's output is kept for the attention's own backward pass, so in bf16 only the outputs of the two norms count; so
    they do in compiled `tensorwise`, cast. `fused` keeps its own copies, also of the attention's output. None keeps SwiGLU's.
    """
    return {"bf16": 2 * 2 * model.d_model, "fused": 3 * model.d_model, "tensorwise": 2 * model.d_model}


def memory_account(rows: pd.DataFrame, config: TrainConfig) -> list[str]:
    """Where the memory goes: what all recipes share, and what each keeps more or less, computed beside measured."""
    measured = rows[(rows["outcome"] == "ok") & rows["peak_gib"].notna()].set_index("variant")
    if "bf16" not in measured.index:
        return []
    size, parameters = weight_dtype(config.precision).itemsize, measured["parameters"].max()
    states = 4 * size * parameters / GIB
    base = measured.loc["bf16", "peak_gib"]
    text = [
        f"*Shared by all:* weights, gradients and two AdamW moments of {size} bytes each are {states:.3g} GiB of the "
        f"{base:.3g} GiB peak of bf16; fp8 is how weights are multiplied, not how they are kept, so it saves none of this."
    ]
    for name, row in measured.iterrows():
        if name != "bf16":
            account = _account(str(name), float(row["more_gib"]), config)
            text.append(
                f"*{run_link(row['label'], row['key'])}:* {more(row['more_gib'])} against bf16 (measured). {account}".strip()
            )
    return text


def _account(recipe: str, measured_gib: float, config: TrainConfig) -> str:
    """What `recipe` keeps until the backward pass, in words, and in bytes where they can be computed."""
    if recipe.startswith("te_"):
        converted = parameters_in(config.model, config.fp8.layers)
        return (
            f"Transformer Engine keeps the quantized weights until the backward pass: {converted / GIB:.3g} GiB for each layout "
            f"kept (computed: one byte for each of {converted / 1e9:.3g}e9 converted parameters)"
            + (", and the compiler cannot fuse or recompute across its layers." if config.compile else ".")
        )
    ways = {
        "fused": "It keeps the input of each layer once, in fp8 and transposed, ready for the weight's gradient; the weights are cast "
        "again in the backward pass, and SwiGLU's output never exists in bf16.",
        "tensorwise": "torch.compile fuses the casts with the norms before them and keeps what they give."
        if config.compile
        else "It keeps the bf16 input and the weight, as bf16 does, and casts again in the backward pass.",
    }
    if recipe not in ways:
        return ""
    computed = config.blocks == "fused" and config.grad_checkpoint == "none" and (config.compile or recipe == "fused")
    if not computed:
        return ways[recipe]
    kept, tokens, layers = kept_inputs(config.model), config.batch_size * config.seq_len, config.model.n_layers
    bf16_gib, fp8_gib = (kept[name] * tokens * layers / GIB for name in ("bf16", recipe))
    account = (
        f"{ways[recipe]} These inputs are {size_of(fp8_gib)} where bf16 keeps {size_of(bf16_gib)} (computed: {kept[recipe]:,} instead "
        f"of {kept['bf16']:,} bytes for each of {tokens:,} tokens and {layers} layers)."
    )
    return account + (" The peak does not show it, so it lies elsewhere in the step." if measured_gib >= 0 else "")
