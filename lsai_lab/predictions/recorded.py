"""Training runs beside what `lsai predict` says of them, and beside what others' formulas say
(`params/estimators.yaml`).

Predictions take seconds each, so those of committed runs are committed, too: `python -m
lsai_lab.predictions.recorded` writes them again, in some minutes; those of runs with a setting that
is gone stay as they were said. Other runs are predicted when they are asked for.
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lsai_core.base.errors import Unavailable, UserError
from lsai_core.config.strict import validated
from lsai_core.config.train import TrainConfig
from lsai_core.prediction.speeds import measured
from lsai_core.profiling.gpus import find_gpu
from lsai_lab.project.files import load_yaml, one_line, repo_root
from lsai_lab.runs.older import with_older, without_gone
from lsai_lab.runs.plain import plain
from lsai_lab.runs.records import Run, recorded_runs
from lsai_lab.searches.config import grown

OURS = "this package"
# A record in other words, or without what a run of its kind found; an operator without a fake.
_UNREADABLE = (
    UserError,
    Unavailable,
    RuntimeError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
)
COLUMNS = [
    "machine",
    "study",
    "variant",
    "part",
    "kind",
    "outcome",
    "run",
    "measured",
    "predicted",
    "predicted_reserved",
    "error",
    "reserved",
    "estimated_s",
    "step_s",
    "speeds",
    "batch",
    "share",
]


def config_of(run: Run, *, with_gone: bool = True) -> TrainConfig:
    """What a recorded training run trained, in today's words; of a search, with the model or batch
    that it found. UserError if it trained nothing, or today's words cannot say it. `with_gone`:
    False for whoever asks for nothing that settings which are gone had changed."""
    kind, results = run.summary.kind, run.summary.results
    if run.summary.outcome == "damaged":
        raise UserError(f"{run.summary.id} is damaged: {run.summary.reason}")
    if kind != "train" and "train" not in run.config:
        raise UserError(f"{run.summary.id} is of kind {kind}: it trained nothing")
    recorded = run.config if kind == "train" else run.config["train"]
    recorded = with_older(recorded if with_gone else without_gone(recorded))
    found = {"batch_search": "largest_batch", "model_search": "largest_size"}.get(kind)
    if found is not None and results.get(found) is None:
        raise UserError(f"{run.summary.id} has found nothing that can be trained")
    if kind == "batch_search":
        recorded |= {"batch_size": max(1, results["largest_batch"])}
    train = validated(TrainConfig, recorded, f"the config of {run.summary.id.name}")
    return (
        grown(train, run.config["grow"], results["largest_size"])
        if kind == "model_search"
        else train
    )


def measured_gib(run: Run) -> float:
    """The peak that a prediction is held against, of a finished training step of this package's
    trainer; 0 if none was measured.

    Active bytes, which on a CPU are the live tensors'. Of the largest model that a search found it
    is allocated bytes; one that was measured in its first step, with no optimizer states before it,
    is left out.
    """
    kind, results = run.summary.kind, run.summary.results
    names = ["mem_peak_active_gib", "mem_peak_allocated_gib"] if kind == "train" else []
    if kind == "model_search" and "states_gib" in results:
        names = ["allocated_gib"]
    return next(
        (
            float(results[name])
            for name in names
            if results.get(name) and run.summary.outcome == "ok"
        ),
        0.0,
    )


def limit_gib(run: Run) -> float:
    """The memory of the GPU that a run ran out of, or that a search for the largest batch filled; 0
    for others."""
    kind, outcome, results = run.summary.kind, run.summary.outcome, run.summary.results
    if (kind, outcome) == ("train", "oom"):
        return float(run.env.get("gpu_memory_gib") or 0)
    full = (kind, outcome) == ("batch_search", "ok") and "GPU" in results["search_limit_kind"]
    return float(results["search_limit_gib"]) if full else 0.0


def predicted_runs(
    runs: Sequence[Run], reports: Path, progress: Callable[[int, int], None] = lambda done, of: None
) -> pd.DataFrame:
    """One row (`COLUMNS`; GiB, s) per training run or search with something to predict; `share`:
    the predicted one of the GPU where the GPU's memory was the limit. Runs that cannot be predicted
    are left out; `frame.attrs["unread"]` says which and why.

    A committed prediction answers for every run that asks the same; each other question is answered
    once, which takes seconds. `progress` is called before each, with the number of runs that are
    done and that of all.
    """
    rows, unread, said_of = [], [], _Answers(runs, reports)
    for number, run in enumerate(runs):
        results, name = run.summary.results, run.summary.id
        try:
            measured, limit = measured_gib(run), limit_gib(run)
            if not measured and not limit:
                continue
            said = said_of(run, lambda done=number: progress(done, len(runs)))  # type: ignore[misc]
        except _UNREADABLE as error:
            unread.append(f"{name.name} ({plain(one_line(str(error), 120))})")
            continue
        rows.append(
            {
                "machine": run.machine,
                "study": name.study,
                "variant": name.variant,
                "part": name.part,
                "kind": run.summary.kind,
                "outcome": run.summary.outcome,
                "run": str(run.folder),
                "measured": measured or None,
                **said,
                "error": said["predicted"] / measured - 1 if measured else None,
                "reserved": results.get("mem_peak_reserved_gib")
                if said["predicted_reserved"]
                else None,
                "step_s": results.get("step_ms", float("nan")) / 1e3,
                "speeds": tested_by(run),
                "batch": results.get("largest_batch"),
                "share": said["predicted"] / limit if limit else None,
            }
        )
    frame = pd.DataFrame(rows, columns=COLUMNS)
    frame.attrs["unread"] = unread
    return frame


@dataclass
class _Answers:
    """What is predicted of `runs`: as it is kept for the run, or for another one that asks the
    same; else predicted now."""

    runs: Sequence[Run]
    reports: Path

    @functools.cached_property
    def _kept(self) -> dict[str, dict[str, Any]]:
        return _kept(self.reports)

    @functools.cached_property
    def _asked(self) -> dict[str, dict[str, Any]]:
        """The kept answers by question: read only where a run has none of its own."""
        found: dict[str, dict[str, Any]] = {}
        for run in self.runs:
            if answer := self._kept.get(run_name(run)):
                with contextlib.suppress(*_UNREADABLE):
                    found.setdefault(question(run), answer)
        return found

    def __call__(self, run: Run, before: Callable[[], None]) -> dict[str, Any]:
        if answer := self._kept.get(run_name(run)):
            return answer
        asked = question(run)
        if asked not in self._asked and asked not in _ANSWERED:
            before()
            _ANSWERED[asked] = predict_again(run)
        return self._asked.get(asked) or _ANSWERED[asked]


_ANSWERED: dict[str, dict[str, Any]] = {}  # by question, in this process


def question(run: Run) -> str:
    """All that a prediction of a run follows from, but for its seed: runs that ask the same get one
    answer."""
    config = config_of(run)
    facts = [run.summary.kind, run.env.get("gpu"), kernel_of(run, config), _is_on_gpu(run)]
    return json.dumps([*facts, config.model_dump(mode="json", exclude={"seed"})])


def _is_on_gpu(run: Run) -> bool:
    results = run.summary.results
    return bool(
        limit_gib(run)
        or "allocated_gib" in results
        or str(results.get("memory_kind")).startswith("CUDA")
    )


def tested_by(run: Run) -> str | None:
    """Whether the speeds behind estimated step times were calibrated on this run (`in sample`);
    None if it tests nothing: a copy, or disturbed."""
    name, known = run.summary.id, measured()["calibrated_on"]
    if run.summary.measured_as or run.summary.results.get("disturbed"):
        return None
    calibrated = run.machine == known["machine"] and f"{name.study}.{name.part}" in known["parts"]
    return "in sample" if calibrated else "out of sample"


def step_errors(frame: pd.DataFrame) -> pd.DataFrame:
    """Of `predicted_runs` the relative errors of estimated step times, a row per setting and
    machine: repeats by their median."""
    keys = ["speeds", "machine", "study", "variant", "part"]
    same = frame.dropna(subset=["estimated_s", "step_s"]).groupby(keys, as_index=False)
    steps = same.agg({"estimated_s": "median", "step_s": "median", "run": "first"})
    return steps.assign(error=steps["estimated_s"] / steps["step_s"] - 1)


def predict_again(run: Run) -> dict[str, Any]:
    """What the code as it stands says of a run: GiB at the peak; on a GPU also reserved GiB, and s
    of a step on one that is known."""
    from lsai_core.prediction.memory import predict  # with torch, which tables do not need
    from lsai_core.prediction.roofline import estimate

    config = config_of(run)
    if not _is_on_gpu(run):
        return {
            "predicted": predict(config, on="cpu").peak,
            "predicted_reserved": None,
            "estimated_s": None,
        }
    kernel = kernel_of(run, config)
    prediction = predict(config, kernel)
    try:
        gpu = find_gpu(str(run.env.get("gpu")))
        time = estimate(config, gpu, kernel)
    except UserError:  # a GPU that is not in the table has no bandwidths
        time = None
    step = time.step_s if time and run.summary.kind == "train" else None
    return {
        "predicted": prediction.peak,
        "predicted_reserved": prediction.reserved,
        "estimated_s": step,
    }


def kernel_of(run: Run, config: TrainConfig) -> str | None:
    """The attention kernel of a run. A search does not say what `auto` came to: FlashAttention-4 in
    16 bits, where the machine had it."""
    known, packages = run.summary.results.get("attention_kernel"), run.env.get("packages") or {}
    chosen = (
        config.attention.backend == "auto"
        and config.precision.startswith("bf16")
        and config.parallel.cp == 1
    )
    return known or ("fa4" if chosen and "flash-attn-4" in packages else None)


def table_path(root: Path | None = None, name: str = "fits") -> Path:
    """Where a committed table of predictions lies."""
    return (root or repo_root()) / "reports" / "recorded" / "predictions" / f"{name}.csv"


def run_name(run: Run) -> str:
    """What names a committed run in the table: machine, study and folder."""
    return "/".join([run.machine, *run.folder.parts[-2:]])


def _kept(reports: Path) -> dict[str, dict[str, Any]]:
    """The committed predictions, by run."""
    path = table_path(reports.parent, "recorded")
    frame = pd.read_csv(path, index_col="run") if path.exists() else pd.DataFrame()
    return {
        str(name): row
        for name, row in frame.astype(object).where(frame.notna(), None).to_dict("index").items()
    }


@functools.cache
def estimator_errors(root: Path | None = None) -> pd.DataFrame:
    """Relative errors of this package and each estimator (columns); a row per recorded run on a GPU
    with a measured peak of active memory and per published figure, which the index tells apart
    (`sample`)."""
    root = root or repo_root()
    runs = {str(run.folder): run for run in recorded_runs(root / "reports")}
    said = predicted_runs([*runs.values()], root / "reports").dropna(
        subset=["error", "predicted_reserved"]
    )
    kept, told = (
        pd.read_csv(table_path(root, "published")),
        load_yaml(root / "params" / "estimators.yaml"),
    )
    said, ran = _known_to_formulas(
        said, [config_of(runs[name], with_gone=False) for name in said["run"]]
    )
    published = [TrainConfig.model_validate_json(config) for config in kept["config"]]
    kept, shown = _known_to_formulas(kept, published)
    configs = [*ran, *shown]
    frame = pd.json_normalize([config.model_dump(mode="json") for config in configs])
    frame = frame.assign(masters=[1] * len(said) + kept["masters"].tolist())
    for name, formula in told["names"].items():
        frame[name] = frame.eval(formula, engine="python")
    pairs = [("measured", "published"), ("error", "error")]
    gib, ours = (pd.concat([said[a], kept[b]], ignore_index=True) for a, b in pairs)
    samples = ["recorded"] * len(said) + ["published"] * len(kept)
    found = pd.DataFrame({OURS: ours})
    for name, other in told["estimators"].items():
        found[name] = frame.eval(other["formula"], engine="python") / 2**30 / gib - 1
    return found.set_index(pd.Index(samples, name="sample"))


def _known_to_formulas(
    rows: pd.DataFrame, configs: Sequence[TrainConfig]
) -> tuple[pd.DataFrame, list[TrainConfig]]:
    """Of `rows` those whose config others' formulas can say: they know neither shared matrices, nor
    stages, nor copies that share nothing but a batch."""
    known = [
        config.parallel.tp * config.parallel.pp == 1 and config.parallel.kind == "fsdp"
        for config in configs
    ]
    # As a series: of no rows, a bare list would choose columns.
    chosen = rows[pd.Series(known, index=rows.index, dtype=bool)]
    return chosen, list(itertools.compress(configs, known))


def beside() -> tuple[float, list[float], dict[str, Any]]:
    """Our median error over that of the best estimator: for published figures, for both samples,
    and the facts of the claim."""
    median = estimator_errors().abs().groupby("sample").median()
    others = median.drop(columns=OURS)
    each, best = median[OURS] / others.min(axis=1), others.loc["published"].idxmin()
    facts = {"of": median.loc["published", OURS], "over": others.loc["published", best]}
    return each["published"], each.tolist(), facts | {"best": best, "total": others.shape[1]}


if __name__ == "__main__":
    reports, rows = repo_root() / "reports", []
    kept = _kept(reports)
    for run in recorded_runs(reports):
        if measured_gib(run) or limit_gib(run):
            try:
                said = predict_again(run)
            except UserError:  # what was predicted with a setting that is gone stays as it was said
                said = kept[run_name(run)]
            said = {name: value and round(value, 4) for name, value in said.items()}
            rows.append({"run": run_name(run)} | said)
            print(f"{len(rows):4d} {rows[-1]['predicted']:8.2f} GiB  {rows[-1]['run']}", flush=True)
    pd.DataFrame(rows).to_csv(table_path(name="recorded"), index=False)
