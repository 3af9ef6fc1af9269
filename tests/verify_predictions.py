"""Predictions of random configurations, written down first and then held against a GPU.

    python tests/verify_predictions.py plan FILE --seed 1            on any machine: draws,
                                                                     predicts, writes
    python tests/verify_predictions.py measure FILE OUT --seconds 240   on a GPU: runs them, writes
                                                                        what was measured beside
    python tests/verify_predictions.py table OUT                        errors of memory, share of
                                                                        right verdicts

With `--processes 2`, plan draws configurations that FSDP shards over two GPUs. `measure` also
writes the allocations of what ran to the end, with the addresses of the driver's segments, to the
folder that LSAI_TRACES names.

Every configuration runs three steps in processes of its own. Several prepare and compile at a time,
so the step times are no measurement of speed. `capped` configurations may reserve a given number of
bytes, within 5 % of the least with which they are predicted to get through: the question is whether
they do. Each run's own allocations are also replayed through the allocator's model (`traced`),
which separates its errors from those of the simulated step.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from lsai_core.base.files import read_jsonl, write_text
from lsai_core.config.train import TrainConfig
from lsai_core.parallel.processes import ProcessWorld, connect
from lsai_core.parallel.world import World
from lsai_core.prediction.allocator import Allocator
from lsai_core.prediction.memory import GIB, Prediction, predict
from lsai_core.prediction.roofline import estimate
from lsai_core.profiling.gpus import find_gpu
from lsai_lab.launch.launch import on_this_machine, torchrun

OPEN, CAPPED = 64, 40  # configurations of each kind
TIMED_STEPS = 7
# processes, what they may reserve together, how long one may take
AT_ONCE, TOGETHER_GIB, PATIENCE_S = 12, 72.0, 90.0


def shape(dice: random.Random, heads: Sequence[int], layers: tuple[int, int]) -> dict[str, Any]:
    """A random Llama with one of these numbers of heads, and of layers between two numbers."""
    pick = dice.choice
    head_dim = pick([64, 128])
    chosen = pick(heads)
    width = chosen * head_dim
    return {
        "n_layers": dice.randint(*layers),
        "d_model": width,
        "n_heads": chosen,
        "n_kv_heads": pick([n for n in range(1, chosen + 1) if chosen % n == 0]),
        "d_ff": 128 * dice.randint(width // 64, width // 32),
        "vocab_size": pick([8192, 16384, 32000, 50304, 100352, 128256]),
    }


def draw(dice: random.Random) -> dict[str, Any]:
    """The settings of a random configuration; some of these are no valid ones."""
    pick = dice.choice
    model = shape(dice, [4, 6, 8, 12, 16, 24], (2, 14))
    model["tie_embeddings"] = dice.random() < 0.2
    fused = dice.random() < 0.7
    return {
        "model": model,
        "seq_len": pick([384, 512, 1024, 1536, 2048, 3072, 4096, 8192]),
        "batch_size": dice.randint(1, 12),
        "grad_accum": pick([1, 1, 1, 2]),
        "precision": pick(["bf16"] * 6 + ["bf16_autocast"] * 3 + ["fp32"]),
        "compile": dice.random() < 0.2,
        "grad_checkpoint": pick(["none"] * 4 + ["selective", "alternating", "attention", "full"]),
        "loss": pick(["fused", "fused", "full"]),
        "blocks": "fused" if fused else "plain",
        "mlp_chunk": pick([None, None, 512, 1000]) if fused else None,
        "fp8": {"recipe": pick(["none"] * 4 + ["fused"])},
        "optim": {
            "states": pick(["full", "full", "full", "8bit"]),
            "kernel": pick(["auto", "torch"]),
        },
        "attention": {"backend": pick(["auto"] * 6 + ["sdpa_flash", "eager"])},
        "data": {"vocab_size": 8192},
        "device": "cuda",
    }


def drawn(
    seed: int, count: int, processes: int, bounds: tuple[float, float]
) -> Iterator[tuple[dict[str, Any], TrainConfig, Prediction]]:
    """`count` valid configurations whose predicted memory lies within bounds."""
    dice = random.Random(seed)
    while count:
        settings = draw(dice)
        if processes > 1:
            settings["parallel"] = {"fsdp": processes, "reshard_after_forward": dice.random() < 0.8}
        try:
            config = TrainConfig.model_validate(settings)
        except ValueError:
            continue
        if settings["optim"] == {"states": "8bit", "kernel": "torch"}:
            continue
        prediction = predict(config)
        if bounds[0] <= prediction.reserved <= bounds[1]:
            count -= 1
            yield settings, config, prediction


def plan(path: Path, seed: int, count: int, processes: int, bounds: tuple[float, float]) -> None:
    """Write the predictions to `path`, a line each."""
    gpu, rows = find_gpu("h100"), []
    dice = random.Random(seed + 1)
    for index, (settings, config, prediction) in enumerate(drawn(seed, count, processes, bounds)):
        expandable, capped = dice.random() < 0.2, index >= OPEN
        cap = _edge(prediction, expandable) * dice.uniform(0.95, 1.05) if capped else None
        found = prediction.on_gpu_with(cap or 1000.0, expandable=expandable)
        time_ = estimate(config, gpu)
        rows.append(
            {
                "name": f"{'capped' if capped else 'open'}-{index}",
                "settings": settings,
                "expandable": expandable,
                "cap_gib": cap,
                "predicted": {
                    "allocated_gib": found.allocated / GIB,
                    "active_gib": prediction.peak,
                    "reserved_gib": found.reserved / GIB,
                    "fits": found.fits,
                    "step_s": time_.step_s if time_ else None,
                },
            }
        )
    random.Random(seed).shuffle(rows)
    rows.sort(key=lambda row: not row["settings"]["compile"])  # what takes longest comes first
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _edge(prediction: Prediction, expandable: bool) -> float:
    """The least GiB with which the replayed steps get through."""
    low, high = 0.9 * prediction.peak, prediction.reserved + 0.1
    while high - low > 0.001 * high:
        middle = (low + high) / 2
        low, high = (
            (low, middle)
            if prediction.on_gpu_with(middle, expandable=expandable).fits
            else (middle, high)
        )
    return high


def measure(path: Path, out: Path, seconds: float, together_gib: float = TOGETHER_GIB) -> None:
    """Run the rows of `path` that can begin within `seconds`, as many at a time as `together_gib`
    of the GPU's memory hold; each goes to `out` with what was measured, or why it failed."""
    rows, end = read_jsonl(path), time.monotonic() + seconds
    room, taken = threading.Condition(), [0.0]
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.NamedTemporaryFile() as lock,
        out.open("w") as file,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):

        def run(row: dict[str, Any]) -> None:
            size = 1.0 + max(row["predicted"]["active_gib"], row["predicted"]["reserved_gib"])
            with room:
                room.wait_for(lambda: taken[0] + size <= together_gib)
                taken[0] += size
            if time.monotonic() < end:
                result = row | _in_a_process(row, lock.name)
                with room:
                    file.write(json.dumps(result) + "\n")
                    file.flush()
            with room:
                taken[0] -= size
                room.notify_all()

        list(pool.map(run, rows))
    print(f"{len(read_jsonl(out))} of {len(rows)} ran")


def _in_a_process(row: dict[str, Any], lock: str) -> dict[str, Any]:
    processes = row["settings"].get("parallel", {}).get("fsdp", 1)
    start = torchrun(processes) if processes > 1 else [sys.executable]
    command = [*start, __file__, "one", lock]
    environment = {
        **on_this_machine(),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "ROW": json.dumps(row),
    }
    if row["expandable"]:
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        return {"measured": json.loads(done.stdout.splitlines()[-1])}
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        said = error if isinstance(error, subprocess.TimeoutExpired) else done.stderr.strip()[-400:]
        return {"failed": str(said)}


def _measured(row: dict[str, Any], lock: Path) -> dict[str, Any]:
    from lsai_core.config.precision import set_matmul_mode
    from lsai_core.optimizers.build import build_optimizer
    from lsai_core.training import step

    device, config = torch.device("cuda"), TrainConfig.model_validate(row["settings"])
    total = torch.cuda.get_device_properties(device).total_memory
    if cap := row["cap_gib"]:
        torch.cuda.set_per_process_memory_fraction(cap * GIB / total)
    world = connect(device) if config.parallel.sharded else World()
    torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
    set_matmul_mode(config.precision)
    tokens = torch.randint(8000, (config.batch_size * config.grad_accum, config.seq_len + 1))
    durations: list[float] = []
    found: dict[str, Any] = {
        "kernel": step.attention_kernel(config, device),
        "gpu": torch.cuda.get_device_name(),
        "fits": True,
    }
    try:
        model = step.prepare_model(config, device)
        optimizer = build_optimizer(model, config.optim)
        for index in range(3):
            if index == 1:
                torch.cuda.reset_peak_memory_stats()
            step.train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:], config, device)
        found |= _memory(cap)
        with lock.open() as file:
            # else the neighbour would wait for the lock, and this process for its neighbour
            if world.size == 1:
                fcntl.flock(file, fcntl.LOCK_EX)
            for _ in range(TIMED_STEPS if world.size == 1 else 0):
                torch.cuda.synchronize()
                began = time.perf_counter()
                step.train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:], config, device)
                torch.cuda.synchronize()
                durations.append(time.perf_counter() - began)
        if durations:
            found |= {"step_s": statistics.median(durations), "step_s_min": min(durations)}
        everybody = world.gather(found)
        found |= {
            key: max(rank[key] for rank in everybody) for key in found if key.endswith("_gib")
        }
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        found |= {"fits": False, "said": str(error)[:600], **_memory(cap)}
    if isinstance(world, ProcessWorld):
        world.close()
    return found


def _memory(cap: float | None) -> dict[str, Any]:
    """Peaks in GiB; without a cap also what the allocator's model reserves for the same
    requests."""
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    found: dict[str, Any] = {
        f"{kind}_gib": stats[f"{kind}_bytes.all.peak"] / GIB
        for kind in ("allocated", "active", "reserved")
    }
    found["flushes"] = stats["num_alloc_retries"]
    if cap is None:
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        if folder := os.environ.get("LSAI_TRACES"):
            write_trace(Path(folder, f"{os.getpid()}.json"), events)
        model = Allocator(expandable="map" in "".join({event["action"] for event in events}))
        streams: dict[int, int] = {}
        blocks: dict[int, Any] = {}
        for event in events:
            if event["action"] == "alloc":
                blocks[event["addr"]] = model.malloc(
                    event["size"], streams.setdefault(event["stream"], len(streams))
                )
            elif event["action"] == "free_completed" and event["addr"] in blocks:
                model.free(blocks.pop(event["addr"]))
        segments = [event["addr"] for event in events if event["action"] == "segment_alloc"]
        found["segments_ascending"] = sum(one < other for one, other in pairwise(segments)) / max(
            1, len(segments) - 1
        )
        found["traced_reserved_gib"] = model.peak_reserved / GIB
    torch.cuda.memory._record_memory_history(enabled=None)
    return found


def write_trace(path: Path, events: list[dict[str, Any]]) -> None:
    """What the process asked for and what the driver gave: action, address, bytes, stream
    (numbered) of each event; the configuration."""
    streams: dict[int, int] = {}
    kept = [
        (
            event["action"],
            event["addr"],
            event["size"],
            streams.setdefault(event["stream"], len(streams)),
        )
        for event in events
        if event["action"] in ("alloc", "free_completed", "segment_alloc")
    ]
    row = json.loads(os.environ["ROW"])
    write_text(
        path, json.dumps({"name": row["name"], "gpu": torch.cuda.get_device_name(), "events": kept})
    )


def table(path: Path) -> dict[str, Any]:
    """Errors over the rows of a measured file: median, 90th and 95th percentile, largest (shares),
    and how many verdicts were right."""
    every = read_jsonl(path)
    rows = [row for row in every if "measured" in row]
    found: dict[str, Any] = {"failed": len(every) - len(rows)}
    for kind in ("allocated_gib", "active_gib", "reserved_gib"):
        pairs = [
            (row["predicted"][kind], row["measured"][kind])
            for row in rows
            if row["cap_gib"] is None and row["predicted"][kind] and row["measured"].get(kind)
        ]
        errors = sorted(abs(predicted / measured - 1) for predicted, measured in pairs)
        if errors:
            found[kind] = {
                "n": len(errors),
                "median": statistics.median(errors),
                "p90": errors[int(0.9 * (len(errors) - 1))],
                "p95": errors[int(0.95 * (len(errors) - 1))],
                "most": errors[-1],
            }
    capped = [row for row in rows if row["cap_gib"]]
    right = sum(row["predicted"]["fits"] == row["measured"]["fits"] for row in capped)
    return found | {"verdicts": len(capped), "right": right}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("plan", "measure", "table", "one"))
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--count", type=int, default=OPEN + CAPPED)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--gib",
        type=float,
        nargs=2,
        default=(1.5, 14.0),
        help="the least and the most that is reserved",
    )
    given = parser.parse_args()
    if given.what == "plan":
        plan(given.file, given.seed, given.count, given.processes, tuple(given.gib))
    elif given.what == "measure":
        measure(given.file, given.out or given.file.with_suffix(".measured.jsonl"), given.seconds)
    # of the others, in a process of its own: the row comes in, what was measured goes out
    elif given.what == "one":
        found = _measured(json.loads(os.environ["ROW"]), given.file)
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps(found))
    else:
        print(json.dumps(table(given.file), indent=1))


if __name__ == "__main__":
    main()
