"""The `scale` kind: what can be measured on one machine of what grows with the number of nodes.

Four things: (1) what an FSDP2 step sends, (2) what a sharded checkpoint puts on disk, (3) how long agents and ranks take to meet,
(4) what a run's record is, in files and bytes, and how fast this disk takes such files. The first three are measured in processes of
their own (`lsai_lab.searches.tries`), which do not wait for a name server. `lsai_lab.analysis_scale` carries them to many nodes.

Sent bytes are counted twice: the buffers that a step hands to the collectives, at torch's dispatcher, and the bytes that each
process passes to the system's write calls. Agents and ranks that meet are threads: the TCPStore client releases the
interpreter's lock, but the agents' state machine is Python, so their figure grows faster than on a machine each.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from pydantic import Field, field_validator
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lsai_core.config import ModelConfig, Precision, TrainConfig
from lsai_core.errors import Unavailable
from lsai_core.files import atomic_writer
from lsai_core.strict import Strict, validated
from lsai_lab.files import repo_root
from lsai_lab.runs.kinds import Context
from lsai_lab.runs.records import Run, find_runs, recorded_runs
from lsai_lab.searches import tries

_HOST = "localhost"
_LIMIT_S = 600.0  # of each of the measuring processes


class Assumptions(Strict):
    """What this machine cannot measure: replace each by what your own cluster shows. Rates are per direction."""

    gpus_per_node: int = Field(4, gt=0)
    nvlink_gb_per_s: float = Field(150.0, gt=0, description="per GPU, to the other GPUs of its node")
    network_gb_per_s: float = Field(25.0, gt=0, description="per GPU, to other nodes (one adapter per GPU)")
    nvlink_latency_us: float = Field(5.0, ge=0, description="one step of a ring within a node")
    network_latency_us: float = Field(15.0, ge=0, description="one step of a ring that crosses nodes")
    filesystem_gb_per_s: float = Field(100.0, gt=0, description="the whole file system, shared by all ranks")
    memory_for_states_gib: float = Field(
        48.0, gt=0, description="of a GPU, for weights, gradients and optimizer states"
    )
    node_mtbf_days: float = Field(1000.0, gt=0, description="mean time between failures of one node")
    peak_tflops: float = Field(989.5, gt=0, description="dense bf16 peak of one GPU")
    mfu: float = Field(0.4, gt=0, le=1, description="used only where no recorded run on a GPU tells")
    tokens_per_gpu: int = Field(8192, gt=0, description="per optimizer step")
    seq_len: int = Field(8192, gt=0)
    variants: int = Field(8, gt=0, description="of a study")
    repeats: int = Field(3, gt=0, description="of each variant")


class ScaleConfig(Strict):
    """What is measured (`model` to `record_copies`) and what the chapter computes from it (`shapes` to `assume`)."""

    model: ModelConfig = Field(description="trained for two steps to count what is sent and saved")
    precision: Precision = "bf16_autocast"
    layouts: list[tuple[int, int]] = Field(description="(shard, replicate) worlds of CPU processes")
    agents: list[int] = Field(description="how many agents (one per node) meet by torchrun's rendezvous")
    clients: list[int] = Field(description="how many ranks meet in one TCPStore")
    repeats: int = Field(5, gt=0, description="of each TCPStore measurement; the median counts")
    record_copies: int = Field(20, gt=0, description="how often a record is written anew to time the disk")
    shapes: dict[str, ModelConfig]
    nodes: list[int]
    shard_nodes: list[int] = Field(description="HSDP: nodes that share one copy of the model")
    assume: Assumptions = Assumptions()

    @field_validator("layouts", mode="before")
    @classmethod
    def _yaml_lists_are_tuples(cls, pairs: Any) -> Any:
        return [tuple(pair) if isinstance(pair, list) else pair for pair in pairs] if isinstance(pairs, list) else pairs


def run(config: ScaleConfig, context: Context) -> dict[str, Any]:
    """Measure; returns the results: `layouts`, `agents`, `clients` (one mapping per row) and the record's figures."""
    if not dist.is_available():
        raise Unavailable("counting collectives needs torch.distributed")
    workers = tries.server(["lsai_core.parallel.checkpoint", "lsai_core.parallel.fsdp"], on_gpu=False)

    def measured(work: tries.Work, argument: Any, processes: int = 1) -> dict[str, float]:
        found = tries.attempt(workers, work, argument, processes=processes, timeout_s=_LIMIT_S)
        if found["outcome"] != "ok":
            raise RuntimeError(f"the measuring process ended: {found['outcome']}, {found['note']}")
        return found["measured"]

    layouts = []
    for shard, replicate in config.layouts:
        with tempfile.TemporaryDirectory(dir=context.folder, prefix="layout-") as work:
            counted = measured(_step_and_save, (config, shard, replicate, work), shard * replicate)
            layout = {"wire_bytes": None, **counted, "shard": shard, "replicate": replicate}
            layouts.append(layout | _checkpoint_files(Path(work)))
    agents = [{"agents": n, **measured(_meet, (_agents, n, 1))} for n in config.agents]
    clients = [{"clients": n, **measured(_meet, (_clients, n, config.repeats))} for n in config.clients]
    return {"layouts": layouts, "agents": agents, "clients": clients, **_records(config, context)}


def _checkpoint_files(work: Path) -> dict[str, int]:
    every = list(next(work.glob("sharded-*")).iterdir())
    shards = [path.stat().st_size for path in every if path.suffix == ".distcp"]
    return {
        "checkpoint_files": len(every),
        "checkpoint_shard_files": len(shards),
        "checkpoint_bytes": sum(path.stat().st_size for path in every),
        "checkpoint_largest_shard_bytes": max(shards),
    }


def read_config(recorded: dict[str, Any]) -> ScaleConfig:
    """The config of a `config.json`, as the records keep it."""
    return validated(ScaleConfig, recorded, "config.json of a scale run")


def _records(config: ScaleConfig, context: Context) -> dict[str, Any]:
    """Files and bytes of the median training record there is, and the time to write such a record anew, file by file."""
    runs = [*find_runs(context.runs_root), *recorded_runs(repo_root() / "reports")]
    sizes = {run.folder: _sizes(run) for run in runs if run.summary.kind == "train"}
    if not sizes:
        raise Unavailable("there is no training record to count yet; run another study first: lsai study memory")
    typical = sorted(sizes.values(), key=sum)[len(sizes) // 2]
    with tempfile.TemporaryDirectory(dir=context.folder, prefix="records-") as folder:
        started = time.perf_counter()
        for copy in range(config.record_copies):
            for number, size in enumerate(typical):
                with atomic_writer(Path(folder) / f"{copy}" / f"{number}") as file:
                    file.write(os.urandom(size))
        seconds = time.perf_counter() - started
    return {
        "records_counted": len(sizes),
        "record_files": len(typical),
        "record_bytes": sum(typical),
        "record_write_s": seconds / config.record_copies,
        "record_files_per_s": config.record_copies * len(typical) / seconds,
    }


def _sizes(run: Run) -> list[int]:
    """Sizes of a record's own files (no hidden ones, no folders), in bytes."""
    return [path.stat().st_size for path in run.folder.iterdir() if path.is_file() and path.name[0] != "."]


class CollectiveBytes(TorchDispatchMode):
    """Counts, while active, the bytes of the full buffer of every collective of this thread and how often each is called.

    `bytes` and `calls` have the keys `all_gather` (gathered output), `reduce_scatter` (input) and `all_reduce`.
    """

    _OPS = {
        "c10d::_allgather_base_": ("all_gather", 0),
        "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
        "c10d::allreduce_": ("all_reduce", 0),
    }

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {name: 0 for name, _ in self._OPS.values()}
        self.calls = dict(self.bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if found := self._OPS.get(func._schema.name):
            name, position = found
            buffers = args[position] if isinstance(args[position], (list, tuple)) else [args[position]]
            self.bytes[name] += sum(buffer.numel() * buffer.element_size() for buffer in buffers)
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def _step_and_save(rank: int, argument: tuple[ScaleConfig, int, int, str]) -> dict[str, float]:
    """One process's FSDP2 step and checkpoint: bytes and calls by collective, full buffers, equal on every process, and
    `wire_bytes`, what it wrote to its sockets, where the system counts it (the caller takes the busiest process's)."""
    from lsai_core.parallel.checkpoint import ShardedCheckpoints
    from lsai_core.parallel.fsdp import build_sharded
    from lsai_core.parallel.processes import connect

    config, shard, replicate, work = argument
    world = connect(torch.device("cpu"))
    spec = {
        "model": config.model.model_dump(),
        "data": {"vocab_size": config.model.vocab_size},
        "precision": config.precision,
        "device": "cpu",
        "parallel": {"fsdp": shard, "replicate": replicate},
    }
    model = build_sharded(validated(TrainConfig, spec, "scale"), torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens_BS = torch.randint(config.model.vocab_size, (1, 33))

    def step() -> None:
        logits_BSV = model(tokens_BS[:, :-1])
        F.cross_entropy(logits_BSV.flatten(0, 1).float(), tokens_BS[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # connects the processes and makes the optimizer's states
    world.barrier()
    before = _written()
    with CollectiveBytes() as counted:
        step()
    after = _written()
    checkpoints = ShardedCheckpoints(Path(work), keep=1, sequences=1, world=world)
    checkpoints.save(1, model, optimizer, 0.0)
    checkpoints.finish()
    return {
        **({} if before is None or after is None else {"wire_bytes": after - before}),
        **{f"{name}_bytes": value for name, value in counted.bytes.items()},
        **{f"{name}_calls": value for name, value in counted.calls.items()},
    }


def _written() -> int | None:
    """Bytes that this process has passed to write calls so far, sockets included; None where the system does not say."""
    process = psutil.Process()
    return getattr(process.io_counters(), "write_chars", None) if hasattr(process, "io_counters") else None


def _meet(rank: int, argument: tuple[Callable[[int], float], int, int]) -> dict[str, float]:
    """Median and slowest seconds of `repeats` meetings of `n` participants."""
    meeting, n, repeats = argument
    seconds = [meeting(n) for _ in range(repeats)]
    return {"seconds": statistics.median(seconds), "slowest_s": max(seconds)}


def _agents(n: int) -> float:
    """Seconds from the first call until all of `n` agents have joined torchrun's c10d rendezvous (real handlers, threads)."""
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    server = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)

    def prepare() -> Any:
        store = dist.TCPStore(_HOST, server.port, is_master=False, wait_for_workers=False)
        backend = C10dRendezvousBackend(store, "scale")
        return DynamicRendezvousHandler.from_backend("scale", store, backend, n, n, _HOST)

    handlers = [prepare() for _ in range(n)]
    seconds = _together([handler.next_rendezvous for handler in handlers])
    for handler in handlers:
        handler._stop_heartbeats()
    return seconds


def _clients(n: int) -> float:
    """Seconds until each of `n` ranks has connected to one TCPStore, left its address, passed a barrier over all and read
    its two neighbours' addresses: the shape of what `init_process_group` asks of the store."""
    server = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)

    def join(rank: int) -> None:
        store = dist.TCPStore(_HOST, server.port, is_master=False, wait_for_workers=False)
        store.set(f"address/{rank}", "x" * 64)
        if store.add("arrived", 1) == n:
            store.set("all", "1")
        store.wait(["all"])
        for neighbour in ((rank + 1) % n, (rank - 1) % n):
            store.get(f"address/{neighbour}")

    return _together([lambda rank=rank: join(rank) for rank in range(n)])  # type: ignore[misc]


def _together(actions: list[Callable[[], Any]]) -> float:
    """Seconds from releasing a thread per action until the last has ended; the first error of any is raised."""
    gate, errors = threading.Barrier(len(actions) + 1), []

    def work(action: Callable[[], Any]) -> None:
        gate.wait()
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    gate.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - started
