"""`lsai predict --script train.py -- ARGS`: a training script as it is, on a simulated GPU.

The script ends with the third step of any of its optimizers: from the second step on all are alike.
What it would do later, such as a final evaluation, is not seen.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lsai_core.base.errors import UserError
from lsai_core.profiling.gpus import Gpu

SHOWN = 12  # causes
STEPS = 3  # of one optimizer
BATCH = "{}"


def predict_script(path: Path, arguments: Sequence[str], gpu: Gpu, as_json: bool) -> bool:
    """Run the script on a simulated `gpu` and print what it would take. False if it does not fit,
    or was stopped before that was known.

    The script's own errors are its own: they end it with their traceback, behind the figures up to
    there. UserError where it made no tensor, for what cannot be simulated, and for what PyTorch
    refuses (with the script's line).
    """
    _require(path)
    found, error = _run(path, arguments, gpu)
    if error is not None and not found.memory:
        raise error
    if not found.memory:
        raise UserError(
            f"--script {path} made no tensor on a GPU; does it need arguments (-- ...)?"
        )
    if as_json:
        print(json.dumps(_figures(found), indent=1))
    else:
        _print(found)
    if error is not None:
        raise error
    return bool(found.fits)


def largest_batch_of(path: Path, arguments: Sequence[str], gpu: Gpu, as_json: bool) -> None:
    """Print the largest batch with which the script fits `gpu`: it runs with numbers in the place
    of `{}` in its arguments. UserError as `predict_script`, and where no argument is one."""
    from lsai_core.prediction.largest import largest_batch

    _require(path)
    if not any(BATCH in argument for argument in arguments):
        raise UserError(
            f"--largest-batch: write {BATCH} where the script's arguments have the batch, as in "
            f"-- --batch-size {BATCH}"
        )

    def run(batch: int) -> None:
        with contextlib.suppress(Enough), few_steps():
            _execute(path, [argument.replace(BATCH, str(batch)) for argument in arguments])

    found = largest_batch(run, gpu)
    if as_json:
        print(json.dumps({"gpu": gpu.name, **asdict(found)}, indent=1))
        return
    end = "" if found.limited else ", the largest that is tried"
    print(f"{gpu.name} ({gpu.memory_gib:.0f} GiB): the largest batch is {found.batch}{end}")
    print("Reserved, GiB: " + ", ".join(f"{b}: {p:.2f}" for b, p in sorted(found.peaks.items())))


def _require(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"--script {path}: no such file")


def _run(path: Path, arguments: Sequence[str], gpu: Gpu) -> tuple[Any, Exception | None]:
    """What was seen of the script, and the error that ended it; a person may end it, too."""
    from lsai_core.prediction.gpu_context import SimulatedGpu

    found, ended = SimulatedGpu(gpu), None
    try:
        with found, contextlib.suppress(Enough), few_steps():
            _execute(path, arguments)
    except KeyboardInterrupt as error:
        found.cut_off(_line_in(path, error), error)
    except Exception as error:
        ended = error
        found.cut_off(_line_in(path, error.__cause__ or error), error.__cause__ or error)
    return found, ended


def _line_in(path: Path, error: BaseException) -> int | None:
    """The last line of the script that led to the error."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return lines[-1] if lines else None


class Enough(BaseException):
    """Ends a script; no `except Exception` of its own stops it."""


@contextlib.contextmanager
def few_steps() -> Iterator[None]:
    """Raise `Enough` after the third step of an optimizer."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = Counter[int]()

    def count(optimizer: Any, *_: Any) -> None:
        steps[id(optimizer)] += 1
        if steps[id(optimizer)] == STEPS:
            raise Enough

    hook = register_optimizer_step_post_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _execute(path: Path, arguments: Sequence[str]) -> None:
    before = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.resolve().parent)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise UserError(f"--script {path} ended with {end.code}") from None
    except (RuntimeError, ModuleNotFoundError) as error:
        line = _line_in(path, error)
        where = "" if line is None else f", line {line}"
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"--script {path}{where}: {reason}") from error
    finally:
        sys.argv, sys.path[0] = before


def _figures(found: Any) -> dict[str, Any]:
    return {
        "gpu": found.gpu.name,
        "verdict": found.verdict,
        "allocated_gib": found.peak_allocated_gib,
        "reserved_gib": found.peak_reserved_gib,
        "phases_gib": found.phases,
        "causes_gib": found.operators,
        "optimizer_steps": found.updates,
        "remark": found.remark,
    }


def _print(found: Any) -> None:
    figures = _figures(found)
    gpu, verdict = found.gpu, figures["verdict"]
    print(f"{gpu.name} ({gpu.memory_gib:.0f} GiB): {verdict}")
    print(
        f"Predicted peaks: {figures['allocated_gib']:.2f} GiB allocated, "
        f"{figures['reserved_gib']:.2f} GiB reserved; of the phases: "
        + ", ".join(f"{name} {size:.2f}" for name, size in figures["phases_gib"].items())
    )
    causes = list(figures["causes_gib"].items())
    print("\nAt the highest moment, GiB (what waits or is in use, by the operator that made it)")
    for name, size in causes[:SHOWN]:
        print(f"  {name:40}{size:9.2f}")
    if len(causes) > SHOWN:
        print(f"  {'others':40}{sum(size for _, size in causes[SHOWN:]):9.2f}")
    if found.updates:
        print(f"\nSeen: {found.updates} optimizer steps")
    if found.remark:
        print(f"\n{found.remark}")
