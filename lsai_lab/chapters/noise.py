"""How far equal work lies apart, and which claims did not hold."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from lsai_lab.analysis.summary import SESSION_SPREAD
from lsai_lab.claims.declared import load_claims
from lsai_lab.claims.evaluate import VERDICTS
from lsai_lab.claims.words import claims_table
from lsai_lab.runs.result_names import is_timed

# The section that has the claims of a study, or of claims that begin so; "" of all others.
_SECTIONS = {
    "memory": "sec-attention",
    "speed": "sec-speed",
    "course": "sec-course",
    "fp8": "sec-fp8",
    "states": "sec-states",
    "rounding": "sec-states",
    "fsdp": "sec-sharding",
    "ablation": "sec-sharding",
    "largest": "sec-sharding",
    "sharing": "sec-ways",
    "context": "sec-context",
    "longcontext": "sec-context",
    "": "sec-prediction",
    "peers": "sec-peers",
}
_KERNELS = {"fa4": "FlashAttention-4", "sdpa_cudnn": "cuDNN"}
_CHOSEN = {"attention": ", kernels by `auto`", "fused_optimizer": ", kernels named"}
_REPEATS = ["machine", "study", "part", "variant"]
SAME_WORK = [
    "gpu",
    "study",
    "part",
    "variant",
    "attention_kernel",
    "batch_size",
    "seq_len",
    "world_size",
    "env.torch",
]


def speed_noise(runs: pd.DataFrame) -> pd.DataFrame:
    """How far the slowest and the fastest of equal runs are apart, one row a kind of equal work:
    `median`, `largest`, `cases`, and the `rule` by which two speeds differ. Runs that shared a GPU
    are left out, and of sessions all that were disturbed."""
    good = runs[runs["outcome"] == "ok"].drop_duplicates(
        ["machine", "started", "wall_s"], keep="last"
    )
    good = good.dropna(subset=["tokens_per_s"])
    beside = good["disturbed"].astype(str).str.contains("processes on the GPU")
    place = [good[name] for name in ("machine", "study", "part")]
    good = good[~beside.groupby(place).transform("any")]
    large = good["parameters"] > 1e9
    sessions = session_differences(good[large & good["disturbed"].isna()])["spread"]
    apart = f"their ranges do not overlap, and their medians are over {SESSION_SPREAD:.1%} apart"
    further = "their medians are further apart than the largest of these"
    across = float(sessions.median()), float(sessions.max()), len(sessions)
    rows = [
        ("repeats, over 1 B parameters", *_apart(good[large], _REPEATS, "run"), apart),
        ("repeats, small models", *_apart(good[~large], _REPEATS, "run"), apart),
        ("sessions, over 1 B parameters", *across, further),
    ]
    return pd.DataFrame(rows, columns=["equal work", "median", "largest", "cases", "rule"])


def _apart(runs: pd.DataFrame, by: Sequence[str], over: str) -> tuple[float, float, int]:
    """Median, largest and number of the distances of equal runs: of each value of `over` its median
    speed, and of groups `by` that have several, largest over smallest less one."""
    speeds = runs.groupby([*by, over])["tokens_per_s"].median()
    groups = speeds.groupby(level=list(by)).agg(["min", "max", "size"])
    apart = (groups["max"] / groups["min"] - 1)[groups["size"] > 1]
    return float(apart.median()), float(apart.max()), len(apart)


def session_differences(runs: pd.DataFrame) -> pd.DataFrame:
    """Of each work that `runs` (rows of `lab.load`) hold under several labels of a machine, which
    are sessions or GPUs of one model: `SAME_WORK`; `sessions`, how many; `low` and `high`, the
    tokens/s of the slowest and the fastest (medians); `spread`, high over low less 1. The smallest
    spread first."""
    good = runs[runs["outcome"] == "ok"].reindex(columns=[*SAME_WORK, "machine", "tokens_per_s"])
    good = good.dropna(subset=[*SAME_WORK, "tokens_per_s"])
    medians = good.groupby([*SAME_WORK, "machine"], as_index=False)["tokens_per_s"].median()
    found = medians.groupby(SAME_WORK, as_index=False)["tokens_per_s"].agg(
        sessions="count", low="min", high="max"
    )
    found = found[found["sessions"] > 1].assign(spread=lambda rows: rows["high"] / rows["low"] - 1)
    return found.sort_values("spread", kind="stable").reset_index(drop=True)


def one_setting(runs: pd.DataFrame) -> pd.DataFrame:
    """The 8 B model in bf16 on one H100, one sequence of 4,096 tokens, fused and compiled, rounded
    to nearest, wherever this report has it, the fastest first: `runs of` (a section, and what
    differs from its other row), the kernel of `attention`, the `median`, `low` and
    `high` of its speed (tokens/s), `n` runs and the first `run`."""
    same = (runs["outcome"] == "ok") & (runs["machine"] == "h100") & (runs["blocks"] == "fused")
    same &= (runs["model.preset"] == "course") & (runs["seq_len"] == 4096)
    same &= (
        (runs["parameters"] > 8e9)
        & (runs["batch_size"] == 1)
        & (runs["precision"] == "bf16")
        & (runs["loss"] == "fused")
    )
    same &= runs["fp8_recipe"].isna() & runs["compile"].eq(True)
    same &= runs["optim.kernel"].isin(["auto", "triton"])
    same &= runs["optim.rounding"].fillna("nearest").eq("nearest")
    groups = runs[same].groupby(["study", "part", "variant", "attention_kernel"], sort=False)
    speed = groups["tokens_per_s"]
    found = pd.DataFrame({"n": groups.size(), "median": speed.median()})
    found["low"], found["high"], found["run"] = speed.min(), speed.max(), groups["run"].first()
    found = found.reset_index().sort_values("median", ascending=False, ignore_index=True)
    rounding = found["part"] == "rounding"
    section = "@" + found["study"].mask(rounding, "states").map(_SECTIONS)
    levers = found["part"] == "levers"
    found["runs of"] = section + found["variant"].map(_CHOSEN).where(levers, "")
    found["attention"] = found["attention_kernel"].map(_KERNELS)
    return found[["runs of", "attention", "median", "low", "high", "n", "run"]]


def claims_with(judged: pd.DataFrame, *verdicts: str) -> pd.DataFrame:
    """The claims of `lab.judged()` with one of `verdicts`: `claim`, `bound`, `measured` in words,
    `study`, `run` (the first that it compares), and `missed`: by what share of its bound the worst
    repeat or the far end of the interval misses it."""
    declared = load_claims()
    found = judged[judged["verdict"].isin(verdicts)].reset_index()
    rows = claims_table(found, declared)[["name", "claim", "bound", "measured"]]
    rows["study"] = [declared[name].study for name in found["name"]]
    rows["run"] = found["run"]
    ends = found[["value", "low", "high"]].astype(float)
    upper = np.array([declared[name].at_most is not None for name in found["name"]])
    limits = np.array([declared[name].limit for name in found["name"]], float)
    worst = np.where(upper, ends.abs().max(axis=1), ends.min(axis=1))
    return rows.assign(missed=np.abs(worst / limits - 1))


def disturbed_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """How many of the `runs` of each study (rows) others disturbed: processes on the same `GPU`,
    or else a run on the same `host`."""
    reason = runs["disturbed"].fillna("").astype(str)
    gpu = reason.str.contains("processes on the GPU")
    host = reason.str.contains("shared the machine") & ~gpu
    return pd.DataFrame({"GPU": gpu, "host": host}).groupby(runs["study"]).sum()


def disturbed_marks(judged: pd.DataFrame, runs: pd.DataFrame) -> pd.Series:
    """By name of a claim of `lab.judged()`: " †" if it is about a speed or a time and any of its
    `runs` is `disturbed`, else nothing."""
    declared = load_claims()
    disturbed = set(runs.loc[runs["disturbed"].notna(), "run"])
    timed = [any(map(is_timed, declared[name].metric)) for name in judged.index]
    marked = [
        on and not disturbed.isdisjoint(of) for on, of in zip(timed, judged["runs"], strict=True)
    ]
    return pd.Series(marked, judged.index).map({True: " †", False: ""})


def first_run_after(judged: pd.DataFrame) -> pd.Series:
    """How long after its bound was set the first run that decides a claim began; negative where it
    began before, NaT where one is unknown."""
    return _time(judged["first_run"]) - _time(judged["bound_set"])


def _time(texts: pd.Series) -> pd.Series:
    return pd.to_datetime(texts, format="ISO8601", utc=True)


def _duration(time: pd.Timedelta) -> str:
    """As `44 s`, `14 min`, `13 h`, `4 days`, with a minus where it is one; a dash if unknown."""
    if pd.isna(time):
        return "–"
    size = abs(time.total_seconds())
    units = (("days", 86400), ("h", 3600), ("min", 60))
    unit, length = next((each for each in units if size >= 2 * each[1]), ("s", 1))
    return f"{'−' if time.total_seconds() < 0 else ''}{size / length:.0f} {unit}"


def all_claims(judged: pd.DataFrame) -> pd.DataFrame:
    """Every claim of `lab.judged()` in words, by verdict (what held comes last) and then in the
    order of the chapters: `claim`, `verdict` (bold where not held),
    `bound`, `measured`, `bound set`, `first run` (how long after that), `section`, `run`."""
    declared = load_claims()
    found = judged.reset_index()
    rows = claims_table(found, declared)
    day = _time(found["bound_set"]).dt.strftime("%b %d").str.replace(" 0", " ")
    rows["bound set"] = day.fillna("–")
    rows["first run"] = first_run_after(found).map(_duration)
    rows["kind"] = rows["verdict"].map([*VERDICTS[1:], VERDICTS[0]].index)
    rows["verdict"] = rows["verdict"].where(found["held"], "**" + rows["verdict"] + "**")
    rows["run"] = found["run"]
    studies = {name: str(declared[name].study) for name in found["name"]}
    rows["section"] = [_SECTIONS.get(study, _SECTIONS[""]) for study in studies.values()]
    others = {"states_": "states", "fresh_fp8_": "fp8", "advised_": "fp8", "memory_": ""}
    for beginning, study in others.items():
        begins = found["name"].str.startswith(beginning)
        rows["section"] = rows["section"].mask(begins, _SECTIONS[study])
    rows["order"] = rows["section"].map([*dict.fromkeys(_SECTIONS.values())].index)
    return rows.sort_values(["kind", "order"], kind="stable", ignore_index=True)
