"""One sequence shared by several GPUs: how fast, beside one GPU alone and beside the formulas of
the chapter on context parallelism.

*Efficiency* compares with one GPU alone at the same length, the others idle. The *share of the best
rate* compares with one GPU's best rate at any length.
"""

import numpy as np
import pandas as pd

from lsai_lab.analysis.summary import SESSION_SPREAD
from lsai_lab.claims.declared import load_claims
from lsai_lab.claims.evaluate import evaluate
from lsai_lab.report.drawings.context import METHODS
from lsai_lab.report.load import points

LINK_BYTES_PER_S = 150e9  # of a GPU to the others of its host, assumed by the formula
STORY = "h200"  # the machine whose runs of one GPU alone serve longer sequences
HEADS_OF = {"mha128": "Llama-2-7B", "gqa128": "Llama-3-8B", "gqa64": "Llama-3.2-1B"}
_KERNELS = {"fa4": "", "sdpa_cudnn": ", cuDNN"}
_COUNTS = {2: "two", 4: "four"}
_RUN = ["machine", "variant", "repeat"]
_SHAPE = ["heads", "kv_heads", "head_dim"]
_ALONE = ("one", "one_torch")


def context_points(runs: pd.DataFrame) -> pd.DataFrame:
    """One row a good point of the studies context and attention (`runs`: rows of both): the point's
    columns, those of its run, and `setting`, GPUs and heads of its run in words."""
    good = runs[runs["study"].isin(["context", "attention"]) & (runs["outcome"] == "ok")]
    found = points(good, ["study", *_SHAPE, "processes", "gpu", "main"])
    found = found[found["outcome"] == "ok"]
    model = found["variant"].str.split("_").str[0].map(HEADS_OF)
    kernel = found["kernel"].map(_KERNELS).fillna("")
    count = found["processes"].map(_COUNTS)
    setting = count + " " + found["gpu"] + "s, " + model + kernel
    # PyTorch's method has a kernel of its own: it is named as the other methods of its run are.
    of_run = setting.where(found["method"] != "torch").groupby(found["run"]).first()
    return found.assign(model=model, setting=found["run"].map(of_run).fillna(setting))


def shared_times(found: pd.DataFrame) -> pd.DataFrame:
    """Of `context_points` those in which several GPUs were timed over one sequence."""
    shared = found[(found["study"] == "context") & (found["processes"] > 1)]
    return shared[(shared["measure"] == "time") & ~shared["method"].isin(_ALONE)]


def against_one_gpu(found: pd.DataFrame) -> pd.DataFrame:
    """Of each run and length of `context_points` the fastest method of this package: `speedup` over
    one GPU alone at that length, `efficiency` (speedup over GPUs), `best_share` (rate of a GPU over
    the best of one alone), `each` (tokens of a GPU); of the formulas `balance` (S*), `start_s`
    (t_0), and the lengths `messages` and `start` that its two conditions demand; `cross`, in the
    first row from which sharing is faster, the length in between."""
    ours = shared_times(found)
    ours = ours[ours["method"] != "torch"].sort_values("training_ms")
    rows = ours.drop_duplicates([*_RUN, "length"]).sort_values([*_RUN, "length"])
    rows = _beside_one(rows, found)
    rows["efficiency"] = rows["speedup"] / rows["processes"]
    rows["best_share"] = rows["training_tflops"] / rows["top"]
    rows["each"] = rows["length"] / rows["processes"]
    rate = 1e12 * rows["top"]
    others = rows["processes"] - 1
    few = 1 + rows["kv_heads"] / rows["heads"]
    rows["balance"] = 8 / 7 * others / rows["processes"] * few * rate / LINK_BYTES_PER_S
    # The shortest sequence is hardly any work.
    rows["start_s"] = rows.groupby(_RUN)["training_ms"].transform("first") / 1e3
    rows["messages"] = rows["balance"] / others
    width = rows["heads"] * rows["head_dim"]
    rows["start"] = (rows["start_s"] * rate / (7 * width)) ** 0.5
    before = rows.groupby(_RUN)[["length", "speedup"]].shift()
    part = np.log(1 / before["speedup"]) / np.log(rows["speedup"] / before["speedup"])
    crossed = (before["speedup"] <= 1) & (rows["speedup"] > 1)
    between = before["length"] * (rows["length"] / before["length"]) ** part
    return rows.assign(cross=between.where(crossed))


def _beside_one(rows: pd.DataFrame, found: pd.DataFrame) -> pd.DataFrame:
    """`rows` with `speedup` over one GPU alone and its best rate, `top` (TFLOP/s): of the same run
    where it was timed there, else of its machine, else by the study of attention."""
    kernel = ["machine", *_SHAPE, "kernel"]
    solo = found[(found["method"] == "one") & (found["measure"] == "time")]
    in_run = solo.groupby([*_RUN, "length"])["training_ms"].median()
    on_machine = solo.groupby([*kernel, "length"])["training_ms"].median()
    top = solo.groupby(kernel)["training_tflops"].max()
    alone = found[(found["study"] == "attention") & (found["machine"] == STORY) & found["main"]]
    alone = alone[(alone["measure"] == "time") & (alone["mask"] == "causal")]
    alone = alone.drop(columns="kernel").rename(columns={"backend": "kernel"})
    rates = alone.groupby([*kernel, "length"])["training_tflops"].median()
    rows = rows.join(in_run.rename("in_run"), on=[*_RUN, "length"])
    rows = rows.join(on_machine.rename("on_machine"), on=[*kernel, "length"])
    rows = rows.join(rates.rename("rate"), on=[*kernel, "length"])
    rows = rows.join(rates.groupby(level=list(range(5))).max().rename("best"), on=kernel)
    rows = rows.join(top.rename("top"), on=kernel)
    work = 7 * rows["length"] ** 2 * rows["heads"] * rows["head_dim"]  # FLOPs, both passes
    one_ms = rows["in_run"].fillna(rows["on_machine"]).fillna(work / rows["rate"] / 1e9)
    top_rate = rows["best"].fillna(rows["top"])
    return rows.assign(speedup=one_ms / rows["training_ms"], top=top_rate)


def crossovers(fastest: pd.DataFrame, length: int) -> pd.DataFrame:
    """One row a setting of `against_one_gpu`: the length from which sharing pays (`cross`, `low`,
    `high`, `n` runs), those that the formulas demand (`start`, `messages`), and the efficiency at
    `length`, measured and by the formula."""
    found = []
    for setting, rows in fastest.groupby("setting", sort=False):
        cross = rows["cross"].dropna()
        first = rows.iloc[0]
        row = {"setting": setting, "cross": cross.median(), "n": len(cross)}
        row |= {"low": cross.min(), "high": cross.max()}
        row |= {"start": first["start"], "messages": first["messages"]}
        row["efficiency"] = rows.loc[rows["length"] == length, "efficiency"].median()
        row["formula"] = 1 / (1 + first["balance"] / length)
        found.append(row | {"run": first["run"]})
    return pd.DataFrame(found)


def method_times(timed: pd.DataFrame, lengths: list[int]) -> dict[str, pd.DataFrame]:
    """Of each setting of `shared_times` a grid, methods by `lengths`: the median time of a method
    over that of the fastest there."""
    grids = {}
    for setting, rows in timed.groupby("setting", sort=False):
        grid = rows.pivot_table("training_ms", "method", "length", aggfunc="median")
        grid = grid.reindex(index=list(METHODS), columns=lengths)
        grids[str(setting)] = grid / grid.min()
    return grids


def equal_work(timed: pd.DataFrame, longer: int) -> float:
    """By how much equal work differs at most over sequences of at least `longer` tokens: repeats of
    one method, and USP beside Ulysses on two GPUs, which are the same there."""
    long = timed[timed["length"] >= longer]
    times = long.groupby(["machine", "variant", "method", "length"])["training_ms"]
    repeats = (times.max() / times.min() - 1)[times.count() >= 3]
    two = long[long["processes"] == 2].pivot_table("training_ms", [*_RUN, "length"], "method")
    twins = (np.log(two["usp"] / two["ulysses"])).abs().pipe(np.expm1)
    return float(max(repeats.max(), twins.max(), SESSION_SPREAD))


def best_rate_claims(runs: pd.DataFrame) -> pd.DataFrame:
    """The claims about the share of one GPU's best rate, judged by `runs`, longest sequence first:
    `what`, `value`, `low`, `high`, `bar`, `verdict`, `held`, `n`."""
    claims = {name: claim for name, claim in load_claims().items() if claim.study == "context"}
    claims = {name: claim for name, claim in claims.items() if claim.beside is not None}
    rows = evaluate(runs, claims).dropna(subset=["value"])
    gpus = runs.drop_duplicates("machine").set_index("machine")["gpu"]
    rows["length"] = [int(claims[name].metric[0].split("_")[1]) for name in rows["name"]]
    rows["bar"] = [claims[name].at_least for name in rows["name"]]
    what = []
    for row in rows.itertuples():
        heads, count = claims[row.name].of.variant[0].split("_")
        kernel = ", cuDNN" if "cuDNN" in claims[row.name].sentence else ""
        gpu = f"{_COUNTS[int(count)]} {gpus[row.machine]}s"
        what.append(f"{gpu}, {HEADS_OF[heads]}{kernel}, {row.length // 1024}K tokens")
    rows = rows.assign(what=what)
    return rows.sort_values(["length", "value"], ascending=False, ignore_index=True)


def long_training(runs: pd.DataFrame) -> pd.DataFrame:
    """Good runs of study longcontext with `GPUs`, `tokens` of a sequence, `seconds` a step,
    `each` (tokens/s of a GPU), `peak_gib`, and `mfu_causal`, which counts only the half of
    attention that a causal mask leaves; a search has these of its largest step."""
    found = runs[(runs["study"] == "longcontext") & (runs["outcome"] == "ok")].copy()
    found["GPUs"] = found["parallel.cp"].fillna(found["train.parallel.cp"])
    found["tokens"] = found["seq_len"].fillna(found["train.seq_len"])
    found["seconds"] = (found["step_ms"] / 1e3).fillna(found["step_s"])
    found["peak_gib"] = found["mem_peak_allocated_gib"].fillna(found["allocated_gib"])
    found["each"] = found["tokens"] / found["seconds"] / found["GPUs"]
    attention = 12 * found["model.n_layers"] * found["model.d_model"] * found["tokens"]
    half = attention / 2 / found["flops_per_token"]
    return found.assign(mfu_causal=found["mfu"] * (1 - half))
