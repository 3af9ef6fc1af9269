"""How good predictions are: their errors by what was predicted and what tested it."""

import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from lsai_core.base.files import read_jsonl
from lsai_core.prediction import memory
from lsai_lab.predictions.programs import compiled_program_errors, program_errors
from lsai_lab.predictions.recorded import step_errors
from lsai_lab.project.files import reading_root
from lsai_lab.report.predicted import prediction_table, tried_predictions

PARTS = list(memory.PARTS)
RECORDED, NEW = "recorded runs", "new configurations"
OTHERS, COMPILED = "others' programs", "others' compiled models"


def prediction_errors(recorded: pd.DataFrame) -> pd.DataFrame:
    """One row per prediction that was tested: `what` (active or reserved memory, time of a step),
    `tested_on`, `predicted` and `measured` (GiB; s), `error`, and `set` of new configurations.

    `recorded`: `run_predictions`. New configurations were predicted before they ran; recorded runs
    were there when the model was made. Last come the programs of others, of which only the first
    `error` is said.
    """
    known = recorded.dropna(subset=["error", "reserved"])
    tries = tried_predictions()
    new = tries[tries["cap_gib"].isna()].dropna(subset="measured.active_gib")
    steps = step_errors(recorded)
    tested = {"in sample": "calibration runs", "out of sample": "all other runs"}
    parts = [
        _rows("active memory", RECORDED, known["predicted"], known["measured"]),
        _rows("reserved memory", RECORDED, known["predicted_reserved"], known["reserved"]),
    ]
    for name in ("active", "reserved"):
        column = f"{name}_gib"
        said, seen = new[f"predicted.{column}"], new[f"measured.{column}"]
        parts.append(_rows(f"{name} memory", NEW, said, seen).assign(set=new["set"]))
    for sample, name in tested.items():
        rows = steps[steps["speeds"] == sample]
        times = _rows("time of a step", name, rows["estimated_s"], rows["step_s"])
        parts.append(times.assign(run=rows["run"], study=rows["study"]))
    others = {OTHERS: program_errors(), COMPILED: compiled_program_errors()}
    for name, programs in others.items():
        for kind in ("active", "reserved"):
            what = f"{kind} memory"
            parts.append(pd.DataFrame({"error": programs[kind]}).assign(what=what, tested_on=name))
    return pd.concat(parts, ignore_index=True)


def _rows(what: str, tested_on: str, predicted: pd.Series, measured: pd.Series) -> pd.DataFrame:
    found = pd.DataFrame({"predicted": predicted, "measured": measured}).astype(float)
    found["error"] = found["predicted"] / found["measured"] - 1
    return found.assign(what=what, tested_on=tested_on).dropna(subset=["error"])


SEARCHES = {"plans.measured": "first", "plans.filled": "blocks", "plans.surely": "last"}


def plans_tried() -> pd.DataFrame:
    """Plans that ran with their budget as the limit of PyTorch's memory: `budget` and `reserved`
    GiB, whether they `held`, and the `search` that made them: the first, that with some blocks that
    keep more than others, the last one."""
    folder = reading_root() / "reports" / "predictions"
    rows = [
        {
            "budget": row["budget_gib"],
            "reserved": row["measured"]["reserved_gib"],
            "held": row["measured"]["fits"],
            "search": search,
        }
        for name, search in SEARCHES.items()
        for row in read_jsonl(folder / f"{name}.jsonl")
    ]
    return pd.DataFrame(rows)


def plans_beside(file: Path | None = None) -> pd.DataFrame:
    """Of each task of `tests/brute_force.py` the shortest step of all rounds (s): of the `plan`, of
    the fastest `setting`, the plan counted, and of PyTorch's fastest `share` of the activations.
    `apart`: the longest step over the shortest of one and the same setting, at worst. A task that
    did not run again has no times. `file`: what the program wrote (default: the committed one)."""
    file = file or reading_root() / "reports" / "predictions" / "plans.brute.jsonl"
    rows = read_jsonl(file)
    shared = {(row["name"], row["setting"]) for row in rows if row.get("share") is not None}
    found = dict[str, dict[str, float]]()
    for name in dict.fromkeys(row["name"] for row in rows):
        rounds = [row["again"] for row in rows if row["name"] == name and "again" in row]
        steps = pd.DataFrame(rounds).rename(columns=int)
        best = steps.min()
        is_share = [(name, setting) in shared for setting in best.index]
        plan = best.get(-1, math.inf)  # what does not run is no plan
        found[name] = {
            "plan": plan,
            "setting": min([plan, *best[~pd.Series(is_share, best.index, dtype=bool)]]),
            "share": best[is_share].min(),
            "apart": (steps.max() / best).max(),
        }
    return pd.DataFrame(found).T


def sorted_errors(errors: Mapping[str, pd.Series]) -> pd.DataFrame:
    """The share of the predictions of each name (`what`) with no larger error than `error`, both in
    percent, by the size of the error."""
    found = []
    for name, error in errors.items():
        size = 100 * error.abs().clip(lower=1e-4).sort_values()
        share = 100 * pd.Series(range(1, len(size) + 1)) / len(size)
        found.append(pd.DataFrame({"what": name, "error": size.array, "share": share.array}))
    return pd.concat(found, ignore_index=True)


def error_summary(errors: pd.DataFrame) -> pd.DataFrame:
    """One row per `what` and `tested_on` of `prediction_errors`: `n`, the median size of the error,
    that of nine in ten, how many are off by more than a tenth, and the ends."""
    groups = errors.groupby(["what", "tested_on"], sort=False)["error"]
    size = errors.assign(size=errors["error"].abs()).groupby(["what", "tested_on"], sort=False)
    found = pd.DataFrame({"n": groups.size()})
    found["median"] = size["size"].median()
    found["nine in ten"] = size["size"].quantile(0.9)
    found["off by > 10%"] = size["size"].agg(lambda each: (each > 0.1).sum()).astype(int)
    found["lowest"] = groups.min()
    found["highest"] = groups.max()
    return found.reset_index()


def verdicts() -> Mapping[str, int]:
    """With memory capped near the prediction, what became of the verdict whether a run fits: `all`,
    `right`, `refused` (a run that fitted), `promised` (a fit that failed)."""
    tries = tried_predictions()
    capped = tries[tries["cap_gib"].notna()]
    said, seen = capped["predicted.fits"].astype(bool), capped["measured.fits"].astype(bool)
    counts = {"all": len(capped), "right": (said == seen).sum()}
    counts |= {"refused": (~said & seen).sum(), "promised": (said & ~seen).sum()}
    return {name: int(count) for name, count in counts.items()}


def host_difference() -> float:
    """By how much two GPUs differ at most in the memory that one configuration reserved."""
    tries = tried_predictions()
    sets = tries["set"].str.partition(".")[0]
    again = tries.groupby([sets, "name"])["measured.reserved_gib"]
    return float((again.max() / again.min()).max() - 1)


def published_errors() -> pd.DataFrame:
    """One row per source of published figures: `figures`, the `smallest` and `largest` (GiB), and
    the signed `median` and `worst` error of our predictions."""
    figures = prediction_table("published")
    groups = figures.groupby("source", sort=False)
    found = pd.DataFrame({"figures": groups.size()})
    found["smallest (GiB)"] = groups["published"].min()
    found["largest (GiB)"] = groups["published"].max()
    found["median error"] = groups["error"].median()
    worst = groups["error"].agg(lambda each: each[each.abs().idxmax()])
    found["largest error"] = worst.where(found["figures"] > 1)
    return found.sort_values("figures", ascending=False, kind="stable").reset_index()


def what_fits(model: str, tokens: int) -> pd.DataFrame:
    """The techniques of the committed table for `model` over sequences of `tokens`, on up to eight
    GPUs, by name: `PARTS` of the peak, `needs` with the allocator's gaps (GiB), `host`, `gpus`."""
    table = prediction_table("fits")
    asked = (table["model"] == model) & (table["tokens"] == tokens) & (table["gpus"] <= 8)
    return table[asked].set_index("technique")
