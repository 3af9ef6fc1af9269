"""Is a plan the fastest? Ten tasks of `plan_tasks.py`, each plan beside fifty other settings and
beside `torch._functorch`'s `activation_memory_budget`.

    python tests/brute_force.py --measure PLANS OUT --seconds 500 --gpus 2 --workers 30    on GPUs
    python tests/brute_force.py --table OUT        the plan's step beside the fastest of either

The tasks are drawn from those of PLANS, which `plan_tasks.py` wrote, with budgets up to 11.5 GiB,
so that many processes share a GPU, and predicted steps of 0.15 to 0.6 s: shorter ones wait for the
host, which other processes keep busy.

A setting is drawn from all that `lsai plan` may choose for the task: numerics that are allowed,
either loss, any kind of checkpointing, half of them in some blocks only, any micro-batch. Each runs
in a process that may reserve the task's budget; what runs out of memory is no rival. Only one
process at a time runs steps on a GPU, while others prepare and compile theirs. Then the plan and
the fastest settings of a task run again, one after another, in three rounds. A time is the shortest
step of all rounds, which the other processes' load on the host disturbs least.

PyTorch's `activation_memory_budget` is the same task with the plan's numerics and loss and no
checkpointing: the compiler of each block keeps a share of the activations. Tried are five shares,
with the plan's micro-batch and the next smaller one, all within the task's budget.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from plan_tasks import GIB

from lsai_core.base.files import read_jsonl
from lsai_core.config.train import TrainConfig
from lsai_core.profiling.gpus import find_gpu
from lsai_lab.predictions.asked import Source
from lsai_lab.predictions.plan_predicted import Room
from lsai_lab.predictions.plan_space import (
    CHECKPOINTS,
    batches,
    chains,
    in_some_blocks,
    loss_chunk,
    with_batch,
)

SEED, COUNT, SETTINGS, LARGEST_GIB, STEP_S = 20, 10, 50, 11.5, (0.15, 0.6)
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)
STEPS, ROUNDS = 2, 3


def draw(plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tasks with their plan and the settings beside it: `settings`, and the `share` of
    activations that the compiler may keep."""
    dice, (shortest, longest) = random.Random(SEED), STEP_S
    fit = [
        row
        for row in plans
        if row["settings"]
        and row["budget_gib"] <= LARGEST_GIB
        and shortest <= row["predicted"]["step_s"] <= longest
    ]
    return [
        {key: row[key] for key in ("name", "budget_gib", "settings", "predicted")}
        | {"others": _others(row, dice) + _shares(row)}
        for row in dice.sample(fit, COUNT)
    ]


def _others(task: dict[str, Any], dice: random.Random) -> list[dict[str, Any]]:
    gpu = find_gpu("h100")
    overrides = {"seq_len": task["seq_len"], "model": task["model"]}
    asked = Source(model="lab").run("h100", None, overrides).config
    room = Room(gpu, task["budget_gib"])
    chunk = loss_chunk(asked, room.usable_gib)
    every = chains(asked, {}, task["numerics"], CHECKPOINTS, gpu.fp8, chunk)
    sizes, sequences = batches(asked, task["tokens"], {})
    found: dict[str, dict[str, Any]] = {}
    while len(found) < SETTINGS:
        kinds = dice.choice(every).kinds
        at = dice.randrange(len(kinds))
        kind = kinds[at]
        if at and dice.random() < 0.5:
            kind = in_some_blocks(kind, dice.randrange(1, kind.model.n_layers), kinds[at - 1])
        config = with_batch(kind, dice.choice(sizes), sequences)
        settings = config.model_dump(mode="json") | {"device": "cuda"}
        settings["attention"]["backend"] = task["settings"]["attention"]["backend"]
        found.setdefault(json.dumps(settings), settings)
    return [{"settings": settings, "share": None} for settings in found.values()]


def _shares(task: dict[str, Any]) -> list[dict[str, Any]]:
    plan = TrainConfig.model_validate(task["settings"])
    sizes = sorted(batches(plan, task["tokens"], {})[0])
    at = sizes.index(plan.batch_size)
    alike = {"grad_checkpoint": "none", "checkpoint_blocks": None, "checkpoint_others": "none"}
    kept = alike | {"saved_inputs": "gpu", "inputs_on_gpu": 0, "mlp_chunk": None}
    found = []
    for size in sizes[max(0, at - 1) : at + 1]:
        batch = {"batch_size": size, "grad_accum": task["tokens"] // plan.seq_len // size}
        settings = task["settings"] | kept | batch
        found += [{"settings": settings, "share": share} for share in SHARES]
    return found


@contextlib.contextmanager
def alone(lock: str) -> Iterator[None]:
    """While no other process of this GPU runs steps."""
    with Path(lock).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Prepared:
    """A model, its optimizer and a batch, after their first step, within `budget_gib`.

    `share`: of activations, the `activation_memory_budget`; None: all that the model keeps.
    """

    def __init__(self, settings: dict[str, Any], budget_gib: float, share: float | None) -> None:
        from lsai_core.config.precision import set_matmul_mode
        from lsai_core.optimizers.build import build_optimizer
        from lsai_core.training import step

        self._device, self._config = torch.device("cuda"), TrainConfig.model_validate(settings)
        total = torch.cuda.get_device_properties(self._device).total_memory
        torch.cuda.set_per_process_memory_fraction(budget_gib * GIB / total)
        torch._functorch.config.activation_memory_budget = 1.0 if share is None else share
        set_matmul_mode(self._config.precision)
        sequences = self._config.batch_size * self._config.grad_accum
        self._tokens = torch.randint(8000, (sequences, self._config.seq_len + 1))
        self._train_step = step.train_step
        self._model = step.prepare_model(self._config, self._device)
        self._optimizer = build_optimizer(self._model, self._config.optim)
        self.step_s()

    def step_s(self) -> float:
        """Seconds of one more step."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        inputs, targets = self._tokens[:, :-1], self._tokens[:, 1:]
        self._train_step(self._model, self._optimizer, inputs, targets, self._config, self._device)
        torch.cuda.synchronize()
        return time.perf_counter() - began


def timed(
    settings: dict[str, Any], share: float | None, budget_gib: float, lock: str
) -> float | None:
    """Seconds of the shortest step; None where memory runs out."""
    try:
        prepared = Prepared(settings, budget_gib, share)
        with alone(lock):
            return min(prepared.step_s() for _ in range(STEPS))
    except torch.OutOfMemoryError:
        return None
    finally:
        prepared = None  # type: ignore[assignment]
        _cleaned()


def _cleaned() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def begin(locks: list[str], counter: Any) -> None:
    """Give a new process its GPU."""
    with counter.get_lock():
        number = counter.value
        counter.value += 1
    gpu = number % len(locks)
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    os.environ["LOCK"] = locks[gpu]
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the workers take all cores


def first(row: dict[str, Any], at: int) -> dict[str, Any]:
    """One setting of a task; -1: the plan."""
    one = row if at < 0 else row["others"][at]
    settings, share = one["settings"], one.get("share")
    found = {"name": row["name"], "setting": at, "share": share}
    try:
        return found | {"step_s": timed(settings, share, row["budget_gib"], os.environ["LOCK"])}
    except Exception as error:  # of one setting; the others go on
        return found | {"failed": str(error)[:200]}


def again(row: dict[str, Any], settings: list[int]) -> dict[str, Any]:
    """One more round of settings of a task, one after another: `again`, seconds of each."""
    found = {at: first(row, at).get("step_s") for at in settings}
    gpu = f"{torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).uuid}"
    return {"name": row["name"], "gpu": gpu, "again": {at: s for at, s in found.items() if s}}


def fastest(rows: list[dict[str, Any]], name: str) -> list[int]:
    """Of a task, the three fastest settings that are not its plan, and the two fastest shares."""
    own = [row for row in rows if row["name"] == name and row.get("step_s") and row["setting"] >= 0]
    own.sort(key=lambda row: row["step_s"])
    settings = [row["setting"] for row in own if row["share"] is None]
    return settings[:3] + [row["setting"] for row in own if row["share"] is not None][:2]


def measure(plans: Path, out: Path, seconds: float, gpus: int, workers: int) -> None:
    """All settings, then the fastest again; what cannot begin within `seconds` is left out."""
    end, drawn = time.monotonic() + seconds, draw(read_jsonl(plans))
    rows: list[dict[str, Any]] = []
    context = get_context("spawn")
    with contextlib.ExitStack() as stack, out.open("w", encoding="utf-8") as file:
        locks = [stack.enter_context(tempfile.NamedTemporaryFile()).name for _ in range(gpus)]

        def kept(row: dict[str, Any]) -> None:
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()

        pool = stack.enter_context(
            ProcessPoolExecutor(
                workers, context, initializer=begin, initargs=(locks, context.Value("i", 0))
            )
        )
        left = {row["name"]: 1 + len(row["others"]) for row in drawn}
        asked = {
            pool.submit(first, row, at): row
            for row in drawn
            for at in range(-1, len(row["others"]))
        }
        repeats = []
        for done in as_completed(asked):
            row = asked[done]
            kept(done.result())
            left[row["name"]] -= 1
            if not left[row["name"]]:
                best = [-1, *fastest(rows, row["name"])]
                repeats += [pool.submit(again, row, best) for _ in range(ROUNDS)]
            if time.monotonic() > end:
                for each in asked:
                    each.cancel()
                break
        for done in as_completed(repeats):
            kept(done.result())


def table(out: Path) -> dict[str, Any]:
    """Of every task that ran again: the plan's step over that of the fastest setting, itself
    counted, and that of the fastest share of activations over the plan's."""
    settings, shares, unserved = dict[str, float](), dict[str, float](), list[str]()
    seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read_jsonl(out):
        for at, step_s in row.get("again", {}).items():
            seconds[row["name"]][int(at)].append(step_s)
    for name, rounds in seconds.items():
        times = {at: min(each) for at, each in rounds.items()}
        plan = times.get(-1, math.inf)  # what does not run is no plan
        settings[name] = plan / min(s for at, s in times.items() if at < SETTINGS)
        rivals = [s for at, s in times.items() if at >= SETTINGS]
        if rivals:
            shares[name] = min(rivals) / plan
        else:
            unserved.append(name)
    return {
        "tasks": len(settings),
        "within 3 %": sum(ratio <= 1.03 for ratio in settings.values()),
        "worst": max(settings.values(), default=None),
        "over the fastest setting": settings,
        "faster than every share": sum(ratio > 1 for ratio in shares.values()),
        "shares over the plan": shares,
        "no share fits": unserved,
    }


def main() -> None:
    """One of the commands above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", type=Path, nargs=2, metavar=("PLANS", "OUT"))
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--table", type=Path)
    asked = parser.parse_args()
    if asked.measure:
        plans, out = asked.measure
        measure(plans, out, asked.seconds, asked.gpus, asked.workers)
    if asked.table:
        print(json.dumps(table(asked.table), indent=1))


if __name__ == "__main__":
    main()
