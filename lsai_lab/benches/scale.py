"""The `scale` kind: what can be measured on one machine of what grows with the number of nodes.

(1) What an FSDP2 step sends: the buffers that it hands to the collectives, counted at torch's dispatcher. (2) How long agents and ranks
take to meet: they are threads; the TCPStore client releases the interpreter's lock, but the agents' state machine is Python, so their
figure grows faster than on a machine each. Both are measured in processes of their own (`lsai_lab.searches.tries`), which do not wait
for a name server. The chapter carries them to many nodes.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lsai_core.config import DataConfig, ModelConfig, ParallelConfig, Precision, TrainConfig
from lsai_core.errors import Unavailable
from lsai_core.strict import Strict, validated
from lsai_lab.runs.kinds import Context
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
    memory_for_states_gib: float = Field(48.0, gt=0, description="of a GPU: weights, gradients and optimizer states")
    node_mtbf_days: float = Field(1000.0, gt=0, description="mean time between failures of one node")
    peak_tflops: float = Field(989.5, gt=0, description="dense bf16 peak of one GPU")
    mfu: float = Field(0.4, gt=0, le=1, description="used only where no recorded run on a GPU tells")
    tokens_per_gpu: int = Field(8192, gt=0, description="per optimizer step")
    seq_len: int = Field(8192, gt=0)


class ScaleConfig(Strict):
    """What is measured (`model` to `repeats`) and what the chapter computes from it (`shapes` to `assume`)."""

    model: ModelConfig = Field(description="trained for two steps to count what is sent")
    precision: Precision = "bf16_autocast"
    layouts: list[Annotated[list[int], Field(min_length=2, max_length=2)]] = Field(
        description="worlds of CPU processes: how many shards, how many replicas"
    )
    agents: list[int] = Field(description="how many agents (one per node) meet by torchrun's rendezvous")
    clients: list[int] = Field(description="how many ranks meet in one TCPStore")
    repeats: int = Field(5, gt=0, description="of each TCPStore measurement; the median counts")
    shapes: dict[str, ModelConfig]
    nodes: list[int]
    shard_nodes: list[int] = Field(description="HSDP: nodes that share one copy of the model")
    assume: Assumptions = Assumptions()


def run(config: ScaleConfig, context: Context) -> dict[str, Any]:
    """Measure; returns the results: `layouts`, `agents`, `clients` (one mapping per row)."""
    if not dist.is_available():
        raise Unavailable("counting collectives needs torch.distributed")
    workers = tries.server(["lsai_core.parallel.fsdp"], on_gpu=False)

    def measured(work: tries.Work, argument: Any, processes: int = 1) -> dict[str, float]:
        found = tries.attempt(workers, work, argument, processes=processes, timeout_s=_LIMIT_S)
        if found["outcome"] != "ok":
            raise RuntimeError(f"the measuring process ended: {found['outcome']}, {found['note']}")
        return found["measured"]

    layouts = [
        {"shard": shard, "replicate": replicate, **measured(_count, (config, shard, replicate), shard * replicate)}
        for shard, replicate in config.layouts
    ]
    agents = [{"agents": n, **measured(_meet, (_agents, n, 1))} for n in config.agents]
    clients = [{"clients": n, **measured(_meet, (_clients, n, config.repeats))} for n in config.clients]
    return {"layouts": layouts, "agents": agents, "clients": clients}


def read_config(recorded: dict[str, Any]) -> ScaleConfig:
    """The config of a `config.json`, as the records keep it."""
    return validated(ScaleConfig, recorded, "config.json of a scale run")


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


def _count(rank: int, argument: tuple[ScaleConfig, int, int]) -> dict[str, float]:
    """One process's FSDP2 step: bytes and calls by collective, full buffers, equal on every process."""
    from lsai_core.parallel.fsdp import build_sharded
    from lsai_core.parallel.processes import connect

    config, shard, replicate = argument
    world = connect(torch.device("cpu"))
    data, parallel = DataConfig(vocab_size=config.model.vocab_size), ParallelConfig(fsdp=shard, replicate=replicate)
    train = TrainConfig(model=config.model, data=data, precision=config.precision, device="cpu", parallel=parallel)
    model = build_sharded(train, torch.device("cpu"))
    tokens_BS = torch.randint(config.model.vocab_size, (1, 33))
    for counted in (contextlib.nullcontext(), counter := CollectiveBytes()):  # the first step connects the processes
        world.barrier()
        with counted:
            logits_BSV = model(tokens_BS[:, :-1])
            F.cross_entropy(logits_BSV.flatten(0, 1).float(), tokens_BS[:, 1:].flatten()).backward()
    world.barrier()
    found: dict[str, float] = {f"{name}_bytes": value for name, value in counter.bytes.items()}
    return found | {f"{name}_calls": value for name, value in counter.calls.items()}


def _meet(rank: int, argument: tuple[Callable[[int], float], int, int]) -> dict[str, float]:
    """Median seconds of `repeats` meetings of `n` participants."""
    meeting, n, repeats = argument
    return {"seconds": statistics.median(meeting(n) for _ in range(repeats))}


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
    gate = threading.Barrier(len(actions) + 1)

    def work(action: Callable[[], Any]) -> None:
        gate.wait()
        action()

    with ThreadPoolExecutor(len(actions)) as pool:
        futures = [pool.submit(work, action) for action in actions]
        gate.wait()
        started = time.perf_counter()
        for future in futures:
            future.result()
        return time.perf_counter() - started
