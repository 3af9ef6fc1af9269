"""From the records of the attention study to the table behind `auto`, and what `auto` is worth by the same records.

A ranking holds the backends that were timed at a shape and are correct there: their errors, measured under the same kind
of mask, do not exceed `errors.ALLOWED` times those of eager attention in the same number format (for inference the
output's error alone). What was not compared with float64 is not ranked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from lsai_core.attention.choice import BACKENDS, choose
from lsai_core.attention.measured import Ranking, select_rankings, shipped
from lsai_core.attention.registry import Case
from lsai_core.errors import Unavailable
from lsai_core.files import read_jsonl
from lsai_core.strict import validated
from lsai_lab.benches.attention.config import AttentionBenchConfig
from lsai_lab.benches.attention.errors import ALLOWED, NAMES
from lsai_lab.runs.records import Run, Summary

Row = dict[str, Any]
Purpose = Literal["training", "inference"]
_TIME: dict[Purpose, str] = {"training": "training_ms", "inference": "forward_ms"}
_JUDGED: dict[Purpose, tuple[str, ...]] = {"training": NAMES, "inference": NAMES[:1]}


def attention_runs(runs: Iterable[Run], *, repeated: bool = False) -> list[Run]:
    """The newest attention run of each machine, study and variant that measured anything.

    `repeated`: of the second and further repeats instead of the first. The table is made from first ones alone, so that the
    others can judge it.
    """
    newest: dict[tuple[str, str, str], Run] = {}
    for run in sorted(runs, key=lambda run: run.summary.started):
        found = run.summary.kind == "attention" and (run.folder / "metrics.jsonl").exists()
        if found and (run.summary.id.repeat > 0) == repeated:
            newest[run.machine, run.summary.id.study, run.summary.id.variant] = run
    return list(newest.values())


def read_points(run: Run) -> tuple[AttentionBenchConfig, list[Row]]:
    """Config and points of a run."""
    config = validated(AttentionBenchConfig, run.config, f"{run.folder}/config.json")
    return config, read_jsonl(run.folder / "metrics.jsonl")


def error_ratio(rows: Sequence[Row], backend: str, mask: str, purpose: Purpose) -> float | None:
    """The largest error of a backend under a kind of mask, in units of eager's; None if it was not measured."""
    ratios = [
        row[name] / max(row[f"bound_{name}"], 1e-30)
        for row in rows
        if row["measure"] == "error" and row["outcome"] == "ok" and (row["backend"], row["mask"]) == (backend, mask)
        for name in _JUDGED[purpose]
        if name in row
    ]
    return max(ratios, default=None)


def _correct(rows: Sequence[Row], names: Iterable[str], mask: str, purpose: Purpose) -> list[str]:
    """Those of `names` that were compared with float64 under this kind of mask and came near enough."""
    ratios = {name: error_ratio(rows, name, mask, purpose) for name in names}
    return [name for name, ratio in ratios.items() if ratio is not None and ratio <= ALLOWED]


def shapes(rows: Sequence[Row]) -> list[tuple[str, int | None, int]]:
    """Mask, window and length of every shape that was timed, in the order of the masks and by length."""
    found = {(row["mask"], row["window"], row["length"]) for row in rows if row["measure"] == "time"}
    return sorted(found, key=lambda shape: (shape[0], shape[1] or 0, shape[2]))


def times(rows: Sequence[Row], shape: tuple[str, int | None, int], purpose: Purpose) -> dict[str, float]:
    """Milliseconds by backend at one shape."""
    return {
        row["backend"]: row[_TIME[purpose]]
        for row in rows
        if row["measure"] == "time"
        and row["outcome"] == "ok"
        and (row["mask"], row["window"], row["length"]) == shape
        and _TIME[purpose] in row
    }


def run_rankings(run: Run) -> list[Ranking]:
    """One ranking for each shape of a run on a GPU; none for other runs."""
    results = run.summary.results
    if run.summary.outcome != "ok" or results.get("compute_capability") is None:
        return []
    config, rows = read_points(run)
    made = []
    for shape in shapes(rows):
        mask, window, length = shape
        order: dict[Purpose, tuple[str, ...]] = {}
        for purpose in _TIME:
            ms = times(rows, shape, purpose)
            correct = _correct(rows, ms, mask, purpose)
            order[purpose] = tuple(sorted(correct, key=lambda name: ms[name]))
        if order["inference"]:
            made.append(
                Ranking(
                    gpu=results["device_name"], capability=results["compute_capability"], dtype=config.dtype,
                    head_dim=config.head_dim, grouped=config.heads != config.kv_heads, causal=mask != "full",
                    window=window, length=length, training=order["training"], inference=order["inference"],
                )
            )  # fmt: skip
    return made


def recorded_rankings(runs: Iterable[Run]) -> list[Ranking]:
    """The table that the records give: sorted, one ranking for each shape of each GPU, of the newest run that has it."""
    found: dict[tuple[Any, ...], Ranking] = {}
    for run in sorted(attention_runs(runs), key=lambda run: run.summary.started):
        for r in run_rankings(run):
            key = (r.gpu, r.dtype, r.head_dim, r.grouped, not r.causal, r.window or 0, r.length)
            found[key] = r
    return [found[key] for key in sorted(found)]


def auto_choices(
    config: AttentionBenchConfig,
    rows: Sequence[Row],
    device_type: str,
    measured: Sequence[Ranking],
    *,
    from_neighbours: bool = False,
) -> list[dict[str, Any]]:
    """What `auto` takes at every shape of a run, by the table `measured`, and how good that is.

    `from_neighbours` hides each shape's own ranking: how good the choice is where nobody measured. One mapping for each shape and purpose: `mask`, `window`, `length`, `purpose`, `chosen`, `fastest` (of the correct ones)
    and `share`, the fastest one's time over the chosen one's; None if the chosen one was not timed.
    """
    outcome = {row["backend"]: row["outcome"] for row in rows if row["measure"] == "backend"}
    good: dict[Purpose, set[str]] = {"training": {"ok"}, "inference": {"ok", "forward only"}}
    found = []
    for shape in shapes(rows):
        mask, window, length = shape
        known = [r for r in measured if not (from_neighbours and _same(r, config, shape))]
        for purpose in _TIME:
            ms = times(rows, shape, purpose)
            correct = _correct(rows, ms, mask, purpose)
            available = {name: None if outcome.get(name) in good[purpose] else "not measured" for name in BACKENDS}
            grouped, causal = config.heads != config.kv_heads, mask != "full"
            case = Case(
                device_type, config.torch_dtype, config.head_dim, window, False, causal, grouped, length, purpose == "training"
            )  # fmt: skip
            try:
                chosen = choose(case, available, known)
            except Unavailable:
                continue
            if not correct:
                continue
            fastest = min(correct, key=lambda name: ms[name])
            share = ms[fastest] / ms[chosen] if chosen in ms else None
            found.append(
                {"mask": mask, "window": window, "length": length, "purpose": purpose, "chosen": chosen,
                 "fastest": fastest, "share": share}
            )  # fmt: skip
    return found


def choices_of(folder: str | Path, *, table: bool = True, from_neighbours: bool = False) -> list[dict[str, Any]]:
    """`auto_choices` at every shape of the run in `folder`, by the table that ships (`table=False`: by the fixed order alone)."""
    run = Run(Path(folder), "", Summary.read(Path(folder)))
    config, rows = read_points(run)
    name, capability = run.summary.results.get("device_name"), run.summary.results.get("compute_capability")
    measured = select_rankings(shipped(), str(name), capability) if table and capability else ()
    device = "cuda" if capability else "cpu"
    return auto_choices(config, rows, device, measured, from_neighbours=from_neighbours)


def _same(ranking: Ranking, config: AttentionBenchConfig, shape: tuple[str, int | None, int]) -> bool:
    mask, window, length = shape
    ours = (config.head_dim, config.heads != config.kv_heads, mask != "full", window, length)
    return ours == (ranking.head_dim, ranking.grouped, ranking.causal, ranking.window, ranking.length)
