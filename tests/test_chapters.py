"""Chapters: executed in this process on the committed records, alone and beside made-up runs of a
reader; what they find is true."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import matplotlib
import nbformat
import pandas as pd
import pytest
from conftest import CHECKOUT
from IPython.display import Markdown

import lsai_lab as lab

CHAPTERS = sorted((CHECKOUT / "notebooks").glob("[0-9]*.ipynb"))


def cells(name: str) -> list[Any]:
    return nbformat.read(CHECKOUT / "notebooks" / f"{name}.ipynb", as_version=4).cells


def execute(
    name: str, monkeypatch: pytest.MonkeyPatch, *studies: str, runs: Any = None
) -> tuple[dict[str, Any], str]:
    """The variables of a chapter after its last cell, and the text of its sentences and tables.
    `runs`: what `lab.load` returns to it, as a function of the real frame."""
    shown: list[str] = []

    def display(value: Any, **_: Any) -> None:
        shown.append(value.data if isinstance(value, Markdown) else "")

    load = lab.load
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(
        lab, "table", lambda *a, **k: shown.append(table(*a, **k).data), raising=False
    )
    monkeypatch.setattr(
        lab, "load", lambda *names: (runs or (lambda frame: frame))(load(*names)), raising=False
    )
    variables: dict[str, Any] = {"display": lambda *_: None}
    with matplotlib.rc_context():
        matplotlib.use("agg")
        for cell in cells(name):
            if cell.cell_type == "code":
                exec(cell.source, variables)
    return variables, "\n".join(shown)


table = lab.table


def committed(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[~frame["own"]].reset_index(drop=True)


def with_own(change: Any) -> Any:
    """The committed runs, and two variants of them as those of a reader's machine, changed."""

    def runs(frame: pd.DataFrame) -> pd.DataFrame:
        frame = committed(frame)
        trained = frame[(frame["outcome"] == "ok") & frame["part"].isin(["train", "levers"])][
            "variant"
        ]
        own = frame[frame["variant"].isin(list(dict.fromkeys(trained))[:2])].copy()
        own = own[own["main"]].assign(machine="box (this machine)", own=True, main=False)
        return pd.concat([change(own), frame], ignore_index=True)

    return runs


SITUATIONS = {
    "none": committed,
    "all well": with_own(lambda own: own),
    "too short to be timed": with_own(
        lambda own: own.assign(tokens_per_s=None, step_ms=None, mfu=None)
    ),
    "no memory": with_own(lambda own: own.assign(**{c: None for c in own if c.startswith("mem")})),
    "all failed": with_own(
        lambda own: own.assign(outcome="oom", reason="out of memory", tokens_per_s=None)
    ),
    "no baseline": with_own(lambda own: own[~own["variant"].isin(own["variant"].head(1))]),
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", ["10-memory", "15-course", "25-speed"])
def test_a_chapter_is_whole_whatever_the_reader_ran(
    name: str, situation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, text = execute(name, monkeypatch, runs=SITUATIONS[situation])
    assert not re.search(r"\b(nan|inf|None)\b[x%]?", text), text
    assert ("[box (this machine)](" in text) == (situation not in ("none", "all failed"))
    assert "[h200](" in text  # another recorded machine
    if situation == "all failed":
        assert "ended as **oom**: out of memory" in text


def untimed(own: pd.DataFrame) -> pd.DataFrame:
    return own.assign(
        tokens_per_s=None, step_ms=None, **{c: None for c in own if c.startswith("mem")}
    )


def failed(own: pd.DataFrame) -> pd.DataFrame:
    """All but the baseline ended with an error, before anything was measured."""
    lost = own["variant"] != "baseline"
    measured = [name for name in own if own[name].dtype.kind == "f" and "." not in name]
    own.loc[lost, ["outcome", "reason", "attention_kernel"]] = ["oom", "out of memory", None]
    own.loc[lost, measured] = None
    return own


@pytest.mark.parametrize("change", [pd.DataFrame.copy, untimed, failed])
@pytest.mark.parametrize(
    "variants", [["baseline"], ["baseline", "bf16"], ["baseline", "flash_attn", "flash_gradcp"]]
)
def test_the_memory_chapter_is_whole_with_a_few_runs_and_no_committed_ones(
    variants: list[str],
    change: Callable[[pd.DataFrame], pd.DataFrame],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def few(frame: pd.DataFrame) -> pd.DataFrame:
        own = frame[
            frame["variant"].isin(variants)
            & (frame["part"] == "train")
            & (frame["repeat"] == 0)
            & frame["main"]
        ]
        own = own.assign(own=True, main=True, machine="box (this machine)").reset_index(drop=True)
        return change(
            own.drop(columns=["largest_batch", "tries", "search_resolution"], errors="ignore")
        )

    _, text = execute("10-memory", monkeypatch, runs=few)
    assert not re.search(r"\b(nan|inf|None)\b[x%]?", text), text


def test_labels_are_unique_and_every_figure_and_table_has_a_caption() -> None:
    labels = Counter()
    for path in CHAPTERS:
        for cell in nbformat.read(path, as_version=4).cells:
            options = dict(re.findall(r"^#\| ([\w-]+): (.+)$", cell.source, re.M))
            if label := options.get("label"):
                labels[label] += 1
                assert options.get("fig-cap" if label.startswith("fig") else "tbl-cap"), label
                assert options.get("fig-alt") or not label.startswith("fig"), label
    assert labels and max(labels.values()) == 1


def test_every_chapter_has_its_parts_in_their_order_and_cites_what_is_listed() -> None:
    sources = set(
        re.findall(r"(?m)^@\w+\{(\S+),", (CHECKOUT / "reports" / "references.bib").read_text())
    )
    # the first is the summary, the last explains terms and lists claims
    for path in CHAPTERS[1:-1]:
        whole = nbformat.read(path, as_version=4).cells
        text = "\n".join(cell.source for cell in whole if cell.cell_type == "markdown")
        places = [
            text.find(part) for part in ("**Question.**", "$$", "\n## What to do", "\n## Limits")
        ]
        assert -1 < places[0] < places[1] < places[2] < places[3], (path.stem, places)
        cited = set(
            re.findall(r"(?<=[\[ ])@([a-z]+\d{4}\w+|transformerengine|torchao|hftrainer)", text)
        )
        assert cited and cited <= sources, (path.stem, cited - sources)
        assert any("#| label: fig-" in cell.source for cell in whole), path.stem


@pytest.mark.parametrize("seeds", [3, 5])
def test_the_memory_chapter_bounds_quality_as_the_claim_does_and_simulates_peaks_as_measured(
    seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(frame: pd.DataFrame) -> pd.DataFrame:
        frame = committed(frame)
        return frame[
            ~(
                (frame["study"] == "memory")
                & (frame["part"] == "train")
                & (frame["repeat"] >= seeds)
            )
        ]

    found, text = execute("10-memory", monkeypatch, runs=runs)
    claim = found["claim"]
    assert f"lies within {found['ends'].max():.4f} nats" in text and f"{seeds} seeds" in text
    if seeds == 5:
        # of five settings together, where the chapter's are of each alone
        assert found["ends"].max() < claim.value < 2 * found["ends"].max()
        assert f"at most {found['bound']:g} nats was made before" in text
        assert f"It has {'held' if claim.held else '**fallen**'}" in text
    else:
        assert claim.note == "3 of 5 runs" and not claim.held
    assert len(found["levels"]) == 4 and found["errors"].abs().max() < 0.1
    for name, level in found["levels"].items():
        measured = found["kernel"]["mem_peak_allocated_gib"][name]
        assert level.max() / measured == pytest.approx(1 + found["peaks"][name], rel=0.01)
        assert abs(level.iloc[-1] - found["fixed"] * 12 / 16) < 0.02  # weights and states are left


def test_the_memory_chapter_tells_the_kernel_from_the_precision_and_equal_work_from_a_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, text = execute("10-memory", monkeypatch, runs=committed)
    rows, changes = found["rows"].set_index("variant"), found["changes"].set_index(["from", "to"])
    assert rows.loc["window_512", "name"] == "window 512 (as flash attention)"
    assert "window_512" not in set(found["ranked"]["variant"])
    speed = rows["tokens_per_s"]
    step = changes.loc[("bf16 autocast", "flash attention"), "speed"]
    assert step == speed["flash_attn"] / speed["bf16"] and f"accounts for {step:.2f}x of it" in text
    assert list(found["front"]["variant"]) == ["flash_gradcp", "flash_attn"]
    assert len(found["least"]) == 3  # three peaks within 0.2 %
    work = found["work"]
    pairs = [
        (work[rows["label"] == old].iloc[0], work[rows["label"] == new].iloc[0])
        for old, new in changes.index
    ]
    assert len(pairs) >= 7 and all((old != new).sum() == 1 for old, new in pairs)
    assert found["chain"].tolist() == ["baseline", "bf16", "flash_attn", "flash_gradcp"]


def test_the_course_chapter_gives_attention_its_own_share_and_tells_the_published_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, text = execute("15-course", monkeypatch, runs=committed)
    classes = found["classes"]
    saved = classes.iloc[0] - classes.iloc[1]
    # the kernel is not all that the middle job changes
    assert 0.5 < saved["attention"] / saved.sum() < 0.7
    assert f"attention (−{saved['attention']:.0f} ms)" in text and "7,515 tokens/s (GH200)" in text
    rows = found["rows"].set_index("variant")
    assert rows["speed"]["fp8"] == rows["tokens_per_s"]["fp8"] / rows["tokens_per_s"]["baseline"]


def test_another_setting_is_not_compared_with_the_published_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, text = execute(
        "15-course", monkeypatch, runs=lambda frame: committed(frame).assign(seq_len=2048)
    )
    assert "GH200" not in text and "7,515" not in text


def test_the_chapter_on_sharding_pairs_like_with_like(monkeypatch: pytest.MonkeyPatch) -> None:
    found, text = execute("45-fsdp", monkeypatch, runs=committed)
    assert not re.search(r"\b(nan|inf|None)\b[x%]?", text), text
    gaps, label = found["gaps"], found["facts"]["label"]
    assert {label[name]: label[base] for name, base in gaps} == {
        "FSDP over 4": "1 process",
        # which rounds as it does; autocast in one process does not
        "FSDP over 4, bf16": "FSDP over 1, bf16",
        "FSDP over 4, fp8": "FSDP over 4, bf16",
    }
    assert [gap.shape[1] for gap in gaps.values()] == [1, 3, 3]
    assert (
        max(
            gap.iloc[:10].max(axis=None)
            for (name, _), gap in gaps.items()
            if label[name] == "FSDP over 4"
        )
        < 1e-6
    )
    alike = found["alike"].set_index(["machine", "repeat", "GPUs"])
    # the base rounds as the sharded runs do
    assert set(alike["precision"].xs(1, level="GPUs")) == {"bf16_residual"}
    speed = alike["tokens_per_s_per_gpu"].unstack()
    for machine, count in (("h200-e", 2), ("h200", 4)):  # each against one GPU of its own session
        share = (speed[count] / speed[1])[machine]
        assert share.count() == 3 and f"**{share.median():.1%}** of the speed" in text
    # Each ratio to torchtitan is of three pairs of one session.
    assert all(
        len(set(ours["machine"]) | set(titan["machine"])) == 1 for ours, titan, *_ in found["pairs"]
    )
    assert [len(ratio) for *_, ratio in found["pairs"]] == [3] * 4
    assert "recipes differ" in text and "memory of the host" in text
    trained = found["found"].set_index(["variant", "part"])["parameters"]
    growth = trained["bf16cp_4", "train_layers"] / trained["bf16cp_1", "train_layers"]
    assert f"{growth:.2f} times as large" in text


def test_the_speed_chapter_counts_only_gains_that_are_larger_than_the_runs_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, text = execute("25-speed", monkeypatch, runs=committed)
    real = set(found["levers"].set_index("variant").query("real").index)
    # the fused loss gains less than two sessions differ
    assert real == {"compiled", "fused_optimizer", "fp8"}
    assert "FlashAttention-4 and SDPA cuDNN are the fastest, and equal" in text
    assert (
        "FlashAttention-4 (@sec-attention) was not installed there, so the attention kernel never "
        "changes" in text
    )
    # No step is faster than its ideal, and no products are faster than the data sheet's peak.
    assert (found["levers"]["step_ms"] > found["ideal"].ms).all()
    products = found["points"].set_index("kernels")["TFLOP/s"]
    assert products["products, bf16 step"] < 989.5 and products["products, fp8 step"] < 1979
    # The classes of kernels and the idle time make up the step.
    steps = found["levers"]["step_ms"].to_numpy()
    assert abs(found["classes"].sum(axis=1).to_numpy() / steps - 1).max() < 0.02


def test_the_machines_reach_less_than_their_data_sheets(monkeypatch: pytest.MonkeyPatch) -> None:
    found, text = execute("01-machine", monkeypatch, runs=committed)
    shares = found["rates"]["of peak"].dropna()
    assert len(shares) >= 4 and shares.between(0.3, 1).all()
    assert not re.search(r"\b(nan|inf|None)\b", text)


def test_the_chapter_on_context_parallelism_divides_by_one_gpu_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, text = execute("55-context", monkeypatch, runs=committed)
    assert not re.search(r"\b(nan|inf|None)\b[x%]?", text), text
    timed = found["timed"].set_index(["variant", "method", "length"])
    alone = found["alone"].query(
        "backend == 'fa4' and heads == 32 and kv_heads == 32 and head_dim == 128"
    )
    rates = alone.groupby("length")["training_tflops"].median()
    row = timed.loc[("mha128_4", "ulysses", 131072)]
    assert row["same length"] == row["training_tflops"] / rates[131072]
    assert row["best length"] == row["training_tflops"] / rates.max() < row["same length"]
    assert (timed["mean_ms"] <= timed["training_ms"] * 1.001).all()  # the slowest GPU counts
    ring = timed.loc[("mha128_4", "ring", 131072), "best length"]
    assert 0.5 < ring < 4 / 7  # what a causal ring of four can reach
    assert "Memory limits the sequence length" in "".join(
        cell.source for cell in cells("55-context")
    )
    assert re.search(
        r"\[Llama-3-8B\]\(\S+\) over 450,560 tokens", text
    )  # the study's model, not this machine's small one
    # One GPU alone is faster at 8,192 tokens and slower at 16,384, and the formulas explain it.
    rows = found["found"]
    assert rows["cross"].between(8192, 16384).all() and len(rows) == 4
    assert (rows["start-up"] / rows["cross"]).between(0.6, 1.1).all()
    assert (rows["efficiency"] - rows["formula"]).abs().max() < 5


def test_the_chapter_on_many_nodes_computes_what_its_formulas_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, text = execute("60-scale", monkeypatch, runs=committed)
    assert not re.search(r"\b(nan|inf|None)\b[x%]?", text), text
    enough = 4 / 3 * found["F"] / found["B"]
    rows = found["at_64"].query("link == 25")
    assert (rows["enough"] / enough).between(0.8, 1.2).all()
    far = found["far"].set_index("model")
    # the formula says 55 and 87 GPUs
    assert set(far["plan"]) == {"HSDP, 16 nodes"} and (far["shard"] == 64).all()
    assert "No network between hosts was available" in "".join(
        cell.source for cell in cells("60-scale")
    )


def test_the_table_of_claims_has_one_notation_and_shows_every_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables, _ = execute("90-terms", monkeypatch)
    found, words = variables["claims"], variables["rows"].set_index("name")
    # a claim that was withdrawn has no value
    assert len(words) >= found["value"].notna().sum() >= len(found) - 1
    assert words["claim"].str.len().between(8, 46).all()
    assert words.loc["hopper_fp8_gain", "bound":"measured"].tolist() == [
        "≥ 1.3x",
        "1.43x (1.43 to 1.44, n = 3)",
    ]
    assert (
        words.loc["hopper_bf16_titan", "measured"] == "1.061x (1.060 to 1.063, n = 3)"
    )  # three digits would hide the range
    assert words.loc["hopper_bf16_memory", "bound":"measured"].tolist() == [
        "≤ 100%",
        "90.5% (n = 3)",
    ]  # of equal repeats
    assert words.loc["sharded_loss", "bound":"measured"].tolist() == [
        "≤ 0.01%, late",
        "0.000067% (n = 1)",
    ]
    assert words.loc["states_bf16_loss", "bound":"verdict"].tolist() == [
        "≤ 0.02",
        "+0.1550 ± 0.0074 (n = 5)",
        "**fallen**",
    ]
    for row in found[found["low"] < found["high"]].itertuples():
        assert re.search(
            r" \([\d.,]+ to [\d.,]+, n = \d\)$|^[+−][\d.]+%? ± [\d.]+%? \(n = \d\)$",
            words.loc[row.name, "measured"],
        ), row.name
