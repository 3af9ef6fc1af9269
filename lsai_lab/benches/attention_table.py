"""From the records of the attention study to the table behind `auto`, and what `auto` is worth by
the same records.

A ranking holds the backends that were timed at a shape and are correct there: their errors,
measured under the same kind of mask, do not exceed `ALLOWED_ERROR` times those of eager attention
in the same number format (for inference the output's error alone).
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lsai_core.attention.choice import BACKENDS, choose
from lsai_core.attention.measured import Ranking, select_rankings, shipped
from lsai_core.attention.registry import Case
from lsai_core.base.errors import Unavailable
from lsai_core.config.strict import validated
from lsai_lab.benches.attention.config import AttentionBenchConfig
from lsai_lab.benches.attention.errors import ALLOWED_ERROR, NAMES
from lsai_lab.benches.points import Row
from lsai_lab.runs.records import Run, read_run

Place = tuple[str, int | None, int]  # mask, window and length
Purpose = Literal["training", "inference"]
# The time that counts, and the errors that must be small enough.
_COUNTS: dict[Purpose, Any] = {"training": ("training", NAMES), "inference": ("forward", NAMES[:1])}


def attention_runs(runs: Iterable[Run]) -> list[Run]:
    """The newest first attention run of each machine, study and variant that measured anything: its
    repeats judge the table that is made from it."""
    newest: dict[tuple[str, str, str], Run] = {}
    for run in sorted(runs, key=lambda run: run.summary.started):
        first = run.summary.kind == "attention" and run.summary.id.repeat == 0
        if first and (run.folder / "metrics.jsonl").exists():
            newest[run.machine, run.summary.id.study, run.summary.id.variant] = run
    return list(newest.values())


def read_points(run: Run) -> tuple[AttentionBenchConfig, list[Row]]:
    """Config and points of a run."""
    config = validated(AttentionBenchConfig, run.config, f"{run.folder}/config.json")
    return config, run.rows


def _place(row: Row) -> Place:
    return row["mask"], row["window"], row["length"]


def ranked(
    rows: Sequence[Row],
) -> Iterator[tuple[Place, Purpose, dict[str, float], dict[str, float]]]:
    """Of every place that was timed and each purpose: milliseconds by backend, and the backends
    that were compared with float64 under this kind of mask and came near enough, fastest first,
    with their TFLOP/s."""
    good = [row for row in rows if row["outcome"] == "ok"]
    places = {_place(row) for row in rows if row["measure"] == "time"}
    for place in sorted(places, key=lambda place: (place[0], place[1] or 0, place[2])):
        timed = [row for row in good if row["measure"] == "time" and _place(row) == place]
        compared = [row for row in good if row["measure"] == "error" and row["mask"] == place[0]]
        for purpose, (time, judged) in _COUNTS.items():
            whole = [row for row in timed if {f"{time}_ms", f"{time}_tflops"} <= row.keys()]
            ms = {row["backend"]: row[f"{time}_ms"] for row in whole}
            rates = {row["backend"]: row[f"{time}_tflops"] for row in whole}
            errors = defaultdict[str, list[float]](list)
            for row in compared:
                errors[row["backend"]] += [
                    row[n] / max(row[f"bound_{n}"], 1e-30) for n in judged if n in row
                ]
            correct = [name for name in ms if max(errors[name], default=math.inf) <= ALLOWED_ERROR]
            yield (
                place,
                purpose,
                ms,
                {name: rates[name] for name in sorted(correct, key=lambda name: ms[name])},
            )


def recorded_rankings(runs: Iterable[Run]) -> list[Ranking]:
    """The table that the records of GPUs give: sorted, one ranking for each shape of each GPU, of
    the newest run that has it."""
    found: dict[tuple[Any, ...], Ranking] = {}
    for run in sorted(attention_runs(runs), key=lambda run: run.summary.started):
        if run.summary.outcome != "ok" or run.summary.results.get("compute_capability") is None:
            continue
        for r in rankings_of(*read_points(run), run.summary.results):
            place = (r.dtype, r.head_dim, r.grouped, not r.causal, r.window or 0, r.length)
            found[r.gpu, *place] = r
    return [found[key] for key in sorted(found)]


def rankings_of(
    config: AttentionBenchConfig, rows: Sequence[Row], results: Mapping[str, Any]
) -> Iterator[Ranking]:
    """The rankings of one run's points, of places where some kernel is correct."""
    order = dict[Place, dict[str, dict[str, float]]]()
    for place, purpose, _, correct in ranked(rows):
        order.setdefault(place, {})[purpose] = correct
    for (mask, window, length), names in order.items():
        if names["inference"]:
            yield Ranking(
                gpu=results["device_name"],
                capability=results["compute_capability"] or "",
                dtype=config.dtype,
                head_dim=config.head_dim,
                grouped=config.heads != config.kv_heads,
                causal=mask != "full",
                window=window,
                length=length,
                training=names["training"],
                inference=names["inference"],
            )


def choices_of(
    folder: str | Path, measured: Sequence[Ranking] | None = None, *, from_neighbours: bool = False
) -> list[dict[str, Any]]:
    """What `auto` takes at every shape of the run in `folder`, by the table `measured` (None: the
    one that ships), and how good that is.

    `from_neighbours` hides each shape's own ranking: how good the choice is where nobody measured.
    Of each shape and purpose: `mask`, `window`, `length`, `purpose`, `chosen`, `fastest` (of the
    correct ones) and `share`, the fastest one's time over the chosen one's; None if the chosen one
    was not timed.
    """
    run = read_run(Path(folder))
    config, rows = read_points(run)
    name, capability = (
        run.summary.results.get("device_name"),
        run.summary.results.get("compute_capability"),
    )
    outcome = {row["backend"]: row["outcome"] for row in rows if row["measure"] == "backend"}
    good: dict[Purpose, set[str]] = {"training": {"ok"}, "inference": {"ok", "forward only"}}
    if measured is None:
        usable = {backend: None if state == "ok" else state for backend, state in outcome.items()}
        measured = select_rankings(shipped(), str(name), capability, usable) if capability else ()
    found = []
    for (mask, window, length), purpose, ms, correct in ranked(rows):
        grouped, causal = config.heads != config.kv_heads, mask != "full"
        own = (config.head_dim, grouped, causal, window, length) if from_neighbours else None
        known = [
            r for r in measured if own != (r.head_dim, r.grouped, r.causal, r.window, r.length)
        ]
        available = {
            name: None if outcome.get(name) in good[purpose] else "not measured"
            for name in BACKENDS
        }
        case = Case(
            "cuda" if capability else "cpu",
            config.torch_dtype,
            config.head_dim,
            window,
            False,
            causal,
            grouped,
            length,
            purpose == "training",
        )
        with contextlib.suppress(Unavailable):
            chosen = choose(case, available, known)
            if correct:
                fastest = next(iter(correct))
                share = ms[fastest] / ms[chosen] if chosen in ms else None
                place = {"mask": mask, "window": window, "length": length, "purpose": purpose}
                found.append({**place, "chosen": chosen, "fastest": fastest, "share": share})
    return found
