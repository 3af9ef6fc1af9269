"""The measuring process of the `scale` kind: `python -m lsai_lab.benches.scale_child <folder>`, `config.json` in, `results.json` out.

It is a process of its own because it must have no threads when it forks the workers, and because its name look-ups are to give
up after a second (torch looks up the peer's name for a log line; an unanswered look-up would cost 5 s each).

Sent bytes are counted twice: the buffers that a step hands to the collectives, at torch's dispatcher, and the bytes that each
process passes to the system's write calls. Agents and ranks that meet are threads: the TCPStore client releases the
interpreter's lock, but the agents' state machine is Python, so their figure grows faster than on a machine each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lsai_core.config import TrainConfig
from lsai_core.files import write_json
from lsai_core.strict import validated
from lsai_lab.benches.scale import ScaleConfig, read_config

_HOST = "localhost"


def main(folder: Path) -> None:
    """Read `config.json`, write `results.json`, both in `folder`."""
    for module in ("lsai_core.parallel.checkpoint", "lsai_core.parallel.fsdp", "torch._dynamo"):
        importlib.import_module(module)  # once, before the forks
    config = read_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    layouts = [measure_layout(config, shard, replicate, folder) for shard, replicate in config.layouts]
    agents = [{"agents": n, "seconds": meet_agents(n)} for n in config.agents]
    clients = []
    for n in config.clients:
        seconds = [meet_clients(n) for _ in range(config.repeats)]
        clients.append({"clients": n, "seconds": statistics.median(seconds), "slowest_s": max(seconds)})
    write_json(folder / "results.json", {"layouts": layouts, "agents": agents, "clients": clients})


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


def measure_layout(config: ScaleConfig, shard: int, replicate: int, folder: Path) -> dict[str, Any]:
    """One FSDP2 step and one checkpoint on `shard * replicate` forked gloo processes; one flat row of what they counted.

    `*_bytes` are full buffers, equal on every process; `wire_bytes` is what the busiest process wrote to its sockets (None
    where the system does not count). Call it in a process without threads.
    """
    work = folder / f"layout-{shard}x{replicate}"
    work.mkdir(parents=True)
    children = []
    for rank in range(shard * replicate):
        pid = os.fork()
        if pid == 0:
            _worker(config, shard, replicate, rank, work)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    if any(codes):
        errors = [path.read_text(encoding="utf-8") for path in sorted(work.glob("*.error"))]
        raise RuntimeError(f"processes of layout {shard} x {replicate} ended with {codes}: {' '.join(errors)[-1000:]}")
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(work.glob("rank-*.json"))]
    checkpoint = next(work.glob("sharded-*"))
    shards = [path.stat().st_size for path in checkpoint.glob("*.distcp")]
    every = list(checkpoint.iterdir())
    wire = [row["wire_bytes"] for row in ranks]
    return {
        **ranks[0],
        "wire_bytes": None if None in wire else max(wire),
        "shard": shard,
        "replicate": replicate,
        "checkpoint_files": len(every),
        "checkpoint_shard_files": len(shards),
        "checkpoint_bytes": sum(path.stat().st_size for path in every),
        "checkpoint_largest_shard_bytes": max(shards),
    }


def _worker(config: ScaleConfig, shard: int, replicate: int, rank: int, work: Path) -> None:
    """One forked process; never returns."""
    try:
        # Not a TCPStore: its server is a thread of the forking process, and a fork while that thread looks up a name leaves
        # the C library's resolver lock held for ever in the child.
        store = dist.FileStore(str(work / "store"), shard * replicate)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=shard * replicate)
        write_json(work / f"rank-{rank}.json", _step_and_save(config, shard, replicate, work))
        dist.barrier()
    except BaseException as error:
        (work / f"rank-{rank}.error").write_text(f"rank {rank}: {type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


def _step_and_save(config: ScaleConfig, shard: int, replicate: int, work: Path) -> dict[str, Any]:
    from lsai_core.parallel.checkpoint import ShardedCheckpoints
    from lsai_core.parallel.fsdp import build_sharded
    from lsai_core.parallel.processes import ProcessWorld

    model_config = config.model.model_dump()
    spec: dict[str, Any] = {
        "model": model_config,
        "data": {"vocab_size": config.model.vocab_size},
        "precision": config.precision,
    }
    spec |= {"device": "cpu", "parallel": {"fsdp": shard, "replicate": replicate}}
    model = build_sharded(validated(TrainConfig, spec, "scale"), torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens_BS = torch.randint(config.model.vocab_size, (1, 33))

    def step() -> None:
        logits_BSV = model(tokens_BS[:, :-1])
        F.cross_entropy(logits_BSV.flatten(0, 1).float(), tokens_BS[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # connects the processes and makes the optimizer's states
    dist.barrier()
    before = _written()
    with CollectiveBytes() as counted:
        step()
    after = _written()
    world = ProcessWorld()
    checkpoints = ShardedCheckpoints(work, keep=1, sequences=1, world=world)
    checkpoints.save(1, model, optimizer, 0.0)
    checkpoints.finish()
    return {
        "wire_bytes": None if before is None or after is None else after - before,
        **{f"{name}_bytes": value for name, value in counted.bytes.items()},
        **{f"{name}_calls": value for name, value in counted.calls.items()},
    }


def _written() -> int | None:
    """Bytes that this process has passed to write calls so far, sockets included; None where the system does not say."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("wchar:")))
    return None


def meet_agents(n: int) -> float:
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


def meet_clients(n: int) -> float:
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


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    main(Path(sys.argv[1]))
