"""This package beside torchtitan, Megatron-Core and the Hugging Face Trainer at the same work."""

from pathlib import Path

import pandas as pd

from lsai_lab.project.files import load_yaml, repo_root

NAMES = {
    "ours_eager": "this package, not compiled",
    "ours_bf16": "this package, compiled",
    "ours_fp8": "this package, fp8, delayed scales",
    "ours_fp8_tensorwise": "this package, fp8, current scales",
    "plain": "our plain loop, library kernels, compiled",
    "hf_eager": "HF Trainer, SDPA, not compiled",
    "hf_flash": "HF Trainer, FlashAttention-2, not compiled",
    "hf_compiled": "HF Trainer, SDPA, compiled",
    "hf_flash_compiled": "HF Trainer, FlashAttention-2, compiled",
    "hf_liger": "HF Trainer, Liger, not compiled",
    "hf_fp8": "HF Trainer, SDPA, fp8, current scales",
    "titan_compiled": "torchtitan, compiled",
    "titan_fp8": "torchtitan, fp8, current scales",
    "titan_eager": "torchtitan, not compiled",
    "megatron_bf16": "Megatron-Core",
    "megatron_bf16_graph": "Megatron-Core, CUDA graph",
    "megatron_fp8_delayed": "Megatron-Core, fp8, delayed scales",
    "megatron_fp8_delayed_graph": "Megatron-Core, fp8, delayed scales, CUDA graph",
    "megatron_fp8_current": "Megatron-Core, fp8, current scales",
    "megatron_fp8_current_graph": "Megatron-Core, fp8, current scales, CUDA graph",
}
# Session, precision, our variant, and the peer's fastest setting of three runs in it.
COMPARED = [
    ("h100", "fp8, compiled", "ours_fp8_tensorwise", "titan_fp8"),
    ("h200", "fp8, compiled", "ours_fp8_tensorwise", "titan_fp8"),
    ("h200-c", "bf16, compiled", "ours_bf16", "hf_flash_compiled"),
    ("h200-g", "fp8, compiled", "ours_fp8_tensorwise", "megatron_fp8_current_graph"),
    ("h200-g", "fp8, delayed scales", "ours_fp8", "megatron_fp8_delayed_graph"),
    ("h200-j", "fp8, delayed scales", "ours_fp8", "megatron_fp8_delayed"),
    ("h200-h", "bf16, compiled", "ours_bf16", "megatron_bf16_graph"),
    ("h100", "bf16, compiled", "ours_bf16", "titan_compiled"),
    ("h200", "bf16, compiled", "ours_bf16", "titan_compiled"),
    ("h200", "bf16, not compiled", "ours_eager", "titan_eager"),
]
SESSIONS = ("h200", "h200-c", "h200-a")  # those with three runs a setting first
# What ours saves by a kernel that the peers lack: study part, variants without and with it.
SAVINGS = {
    "optimizer": ("levers", "fused_blocks", "fused_optimizer"),
    "attention": ("attention", "att_fa2", "att_fa4"),
    "fp8 layers": ("speed", "torchao_tensorwise", "tensorwise"),
}


def _speeds(runs: pd.DataFrame) -> pd.DataFrame:
    """The good runs whose speed is compared: not those that compare curves of losses."""
    return runs[(runs["outcome"] == "ok") & runs["part"].isin(["ours", "peer", "megatron"])]


def peer_comparisons(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per comparison of study peers (`runs`): `session`, `gpu`, `precision`, the `peer`'s
    setting, `sequences` a step, `ours` and `theirs` (tokens/s, medians), `ratio` with the `low` and
    `high` of its pairs of one round each, the lead in `ms` a step, and both's first `run`."""
    good = _speeds(runs)
    rows = []
    for session, precision, ours, theirs in COMPARED:
        here = good[good["machine"] == session]
        mine, peer = (here[here["variant"] == name].set_index("repeat") for name in (ours, theirs))
        pairs = mine["tokens_per_s"] / peer["tokens_per_s"]
        speeds = [each["tokens_per_s"].median() for each in (mine, peer)]
        lead_ms = peer["step_ms"].median() - mine["step_ms"].median()
        row = {"session": session, "gpu": mine["gpu"].iloc[0], "precision": precision}
        row |= {"sequences": int(mine["batch_size"].iloc[0])}
        row |= {"peer": NAMES[theirs], "ours": speeds[0], "theirs": speeds[1]}
        row |= {"ratio": speeds[0] / speeds[1], "low": pairs.min(), "high": pairs.max()}
        both = (peer["run"].iloc[0], mine["run"].iloc[0])
        rows.append(row | {"n": pairs.count(), "ms": lead_ms, "run": both})
    return pd.DataFrame(rows)


def peer_settings(runs: pd.DataFrame) -> pd.DataFrame:
    """Every setting on one H200 at batch 2, fastest first: `ratio` of its speed over that of this
    package, compiled in bf16, in the same session; `n` runs, `mem_peak_allocated_gib`, `kind`
    (ours, torchtitan, HF Trainer)."""
    good = _speeds(runs)
    good = good[good["machine"].isin(SESSIONS)]
    good = good[(good["batch_size"] == 2) & good["variant"].isin(NAMES)]
    groups = good.groupby(["machine", "variant"])
    found = groups[["tokens_per_s", "mem_peak_allocated_gib"]].median()
    found = found.assign(n=groups.size(), run=groups["run"].first()).reset_index()
    base = found[found["variant"] == "ours_bf16"].set_index("machine")["tokens_per_s"]
    found["ratio"] = found["tokens_per_s"] / found["machine"].map(base)
    order = found["machine"].map(SESSIONS.index)
    found = found.assign(order=order).sort_values("order").drop_duplicates("variant")
    kinds = {"ours": "ours", "plain": "ours", "titan": "torchtitan", "hf": "HF Trainer"}
    kinds["megatron"] = "Megatron-Core"
    found["kind"] = found["variant"].str.split("_").str[0].map(kinds)
    found["setting"] = found["variant"].map(NAMES)
    return found.sort_values("ratio", ascending=False, ignore_index=True)


def peer_savings(comparisons: pd.DataFrame, ablation: pd.DataFrame) -> pd.DataFrame:
    """The compiled `comparisons` with torchtitan and the Hugging Face Trainer, with the
    milliseconds that this package saves by kernels that they lack, as studies speed and fp8
    measured them within this package (`ablation`); missing where it was not measured on that
    GPU."""
    good = ablation[ablation["outcome"] == "ok"]
    ms = good.groupby(["gpu", "part", "variant"])["step_ms"].median()
    compiled = ~comparisons["precision"].str.contains("not")
    theirs = ~comparisons["peer"].str.startswith("Megatron")  # its layers are others
    rows = comparisons[compiled & theirs].reset_index(drop=True)
    lacks = {
        "optimizer": pd.Series(True, index=rows.index),
        "attention": rows["peer"].str.contains("FlashAttention-2"),
        "fp8 layers": rows["precision"].str.startswith("fp8"),
    }
    for name, (part, without, having) in SAVINGS.items():
        saved = {
            gpu: ms[gpu, part, without] - ms.get((gpu, part, having), float("nan"))
            for gpu in rows["gpu"].unique()
            if (gpu, part, without) in ms.index
        }
        rows[name] = rows["gpu"].map(saved).where(lacks[name])
    return rows


def published_speeds(root: Path | None = None) -> pd.DataFrame:
    """What other projects published for a model of this size (`params/anchors.yaml`): `project`,
    `what` was measured, `tokens` a second and `tflops` a GPU where the source says, `date`, `url`;
    the newest first."""
    rows = pd.DataFrame(load_yaml((root or repo_root()) / "params" / "anchors.yaml")["speeds"])
    rows = rows[["project", "what", "tokens", "tflops", "date", "url"]].astype({"date": str})
    return rows.sort_values("date", ascending=False, kind="stable", ignore_index=True)
