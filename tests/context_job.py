"""What the processes of `test_context.py` do: `context_job.py <folder>` runs every world size and
writes `<folder>/<name>.json`.

One process imports everything and forks the ranks of each world, because importing torch takes
longer than the cases.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lsai_core.base.errors import Unavailable, UserError
from lsai_core.config.model import AttentionConfig, GradCheckpoint, ModelConfig
from lsai_core.context import METHODS, ContextParallel
from lsai_core.model.transformer import build_model

LENGTH, HEAD_DIM, BATCH = 144, 16, 2
OURS = [name for name, method in METHODS.items() if not method.peer]
HEADS = {1: [(8, 8), (8, 2), (8, 1)], 2: [(8, 8), (8, 2), (8, 1)], 3: [(24, 24), (24, 6), (24, 3)]}
HEADS[4] = HEADS[8] = HEADS[2]
WINDOWS = [1, 40, 100]
FLOAT = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def cases(world: int) -> list[dict[str, Any]]:
    """Every method with every ratio of heads and every window in fp64; the fused kernel in fp32 and
    bf16; few for 8."""
    found = []
    for method in OURS:
        base = {"method": method, "kernel": "eager", "dtype": "fp64", "window": None}
        for heads in HEADS[world] if world < 8 else HEADS[world][1:2]:
            found.append({**base, "heads": heads})
        for window in WINDOWS if world < 8 else WINDOWS[2:3]:
            found.append({**base, "heads": HEADS[world][1], "window": window})
        for dtype in ("fp32", "bf16"):
            found.append({**base, "heads": HEADS[world][1], "dtype": dtype, "kernel": "sdpa_flash"})
        found.append(
            {**base, "heads": HEADS[world][1], "window": 40, "dtype": "fp32", "kernel": "auto"}
        )
    return found


def inputs(heads: tuple[int, int], seq_len: int = LENGTH) -> list[Tensor]:
    """q, k, v and the gradient of the output, whole, fp64; values that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, seq_len, n, HEAD_DIM) for n in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(shape, generator=generator).bfloat16().double() for shape in shapes]


def reference(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The definition, in the dtype of the inputs."""
    position = torch.arange(q.shape[1], device=q.device)
    distance = position[:, None] - position[None, :]
    allowed = (distance >= 0) & (distance < (window or q.shape[1]))
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[3] ** 0.5
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)


@functools.cache
def exact(heads: tuple[int, int], window: int | None, seq_len: int = LENGTH) -> list[Tensor]:
    """Output, dq, dk and dv of the definition, fp64."""
    *qkv, gradient = inputs(heads, seq_len)
    qkv = [x.requires_grad_() for x in qkv]
    out = reference(qkv[0], qkv[1], qkv[2], window)
    return [out.detach(), *torch.autograd.grad(out, qkv, gradient)]


def relative(value: Tensor, expected: Tensor) -> float:
    """||value - expected|| / ||expected||; per element where exactly zero is expected."""
    size = expected.norm() if expected.norm() > 0 else torch.tensor(expected.numel() ** 0.5)
    return float((value.double() - expected).norm() / size)


def errors(case: dict[str, Any]) -> list[float]:
    """Of output, dq, dk, dv against fp64 attention in one process; empty on all ranks but the
    first."""
    cp = ContextParallel(case["method"], LENGTH, window=case["window"], kernel=case["kernel"])
    dtype = FLOAT[case["dtype"]]
    *qkv, gradient = (cp.shard(x).to(dtype) for x in inputs(case["heads"]))
    qkv = [x.requires_grad_() for x in qkv]
    out = cp.attention(qkv[0], qkv[1], qkv[2])
    assert out.dtype == dtype
    found = [out, *torch.autograd.grad(out, qkv, gradient)]
    whole = [cp.unshard(x) for x in found]
    if cp.rank:
        return []
    return [
        relative(a, b) for a, b in zip(whole, exact(case["heads"], case["window"]), strict=True)
    ]


def every_case(rank: int, world: int) -> Any:
    return [{**case, "errors": errors(case)} for case in cases(world)]


def model(rank: int, world: int) -> Any:
    """Largest differences of loss and gradients of a small decoder from one process's, by method
    and checkpointing."""
    shape = ModelConfig(n_layers=1, d_model=32, n_heads=4, n_kv_heads=2, d_ff=64, vocab_size=50)
    tokens = torch.randint(50, (2, 33), generator=torch.Generator().manual_seed(0))
    config = AttentionConfig(backend="eager", window=None)

    def step(
        context: ContextParallel | None, keep: GradCheckpoint, compiled: bool = False
    ) -> list[Tensor]:
        decoder = build_model(shape, config, grad_checkpoint=keep, dtype=torch.float64)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if context is not None:
            decoder.share_sequence(context)
            inputs, targets = context.shard(inputs), context.shard(targets)
        for block in decoder.blocks if compiled else []:
            block.compile(backend="aot_eager", fullgraph=True)
        logits = decoder(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        found = [loss.detach(), *(p.grad for p in decoder.parameters() if p.grad is not None)]
        if context is not None:
            for x in found:
                dist.all_reduce(x)
                x /= world
        return found

    expected = step(None, "none")
    differences = {}
    for method in OURS:
        for keep in get_args(GradCheckpoint):
            found = step(ContextParallel(method, 32, kernel="eager"), keep)
            differences[f"{method} {keep}"] = max(
                relative(a, b) for a, b in zip(found, expected, strict=True)
            )
    found = step(ContextParallel("usp", 32, kernel="eager"), "selective", compiled=True)
    differences["usp compiled"] = max(relative(a, b) for a, b in zip(found, expected, strict=True))
    return differences


def refusals(rank: int, world: int) -> Any:
    """What every rank is told about requests that cannot work."""
    q, k, v, _ = (x.float() for x in inputs((8, 2)))

    def heads(n: int) -> None:
        cp = ContextParallel("ulysses", LENGTH)
        cp.attention(cp.shard(q)[:, :, :n], cp.shard(k)[:, :, :1], cp.shard(v)[:, :, :1])

    def wrong_slice() -> None:
        cp = ContextParallel("ring", LENGTH)
        cp.attention(cp.shard(q)[:, 1:], cp.shard(k)[:, 1:], cp.shard(v)[:, 1:])

    requests: dict[str, Callable[[], Any]] = {
        "uneven": lambda: ContextParallel("zigzag", LENGTH + 2),
        "short": lambda: ContextParallel("ring", 1),
        "disagree": lambda: ContextParallel("ring", LENGTH if rank else 2 * LENGTH),
        "one uneven": lambda: ContextParallel("ring", LENGTH if rank else LENGTH + 1),
        "unknown": lambda: ContextParallel("zigzak", LENGTH),
        "mesh": lambda: ContextParallel("usp", LENGTH, ulysses=3),
        "choice": lambda: ContextParallel("ring", LENGTH, ulysses=2),
        "window": lambda: ContextParallel("ring", LENGTH, window=0),
        "kernel": lambda: ContextParallel("ring", LENGTH, kernel="flex").attention(
            *map(ContextParallel("ring", LENGTH).shard, (q, k, v))
        ),
        "torch": lambda: ContextParallel("torch", LENGTH),
        "heads": lambda: heads(3),
        "slice": wrong_slice,
    }
    told = {}
    for name, request in requests.items():
        try:
            request()
            told[name] = "accepted"
        except (UserError, Unavailable) as error:
            told[name] = f"{type(error).__name__}: {error}"
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, told)
    return everybody


def one_dies(rank: int, world: int) -> Any:
    cp = ContextParallel("zigzag", LENGTH)
    q, k, v, _ = (cp.shard(x) for x in inputs((8, 2)))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(1000):
        cp.attention(q, k, v)


def one_is_wrong(rank: int, world: int) -> Any:
    cp = ContextParallel("lightseq", LENGTH)
    q, k, v, _ = (cp.shard(x)[:, rank % 2 :] for x in inputs((8, 2)))  # odd ranks lost a position
    for _ in range(1000):
        cp.attention(q, k, v)


JOBS = {
    **{f"world-{world}": (world, every_case) for world in (1, 2, 3, 4, 8)},
    "model": (4, model),
    "refusals": (4, refusals),
    "dies": (4, one_dies),
    "wrong": (4, one_is_wrong),
}


def start(folder: Path, name: str) -> None:
    """Run one job with forked ranks; `<name>.json` holds how they ended, after how long, and what
    rank 0 returned."""
    world, job = JOBS[name]
    begin = time.monotonic()
    pids = []
    for rank in range(world):
        if (pid := os.fork()) == 0:
            os._exit(_rank(folder, name, rank, world, job))
        pids.append(pid)
    ended = []
    for pid in pids:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ended.append(code)
    returned = folder / f"{name}.returned.json"
    facts = {"ended": ended, "seconds": time.monotonic() - begin}
    facts["errors"] = [
        path.read_text() if (path := folder / f"{name}.{r}.error").exists() else None
        for r in range(world)
    ]
    facts["returned"] = json.loads(returned.read_text()) if returned.exists() else None
    (folder / f"{name}.json").write_text(json.dumps(facts))


def _rank(folder: Path, name: str, rank: int, world: int, job: Callable[[int, int], Any]) -> int:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/{name}.store",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=40),
        )
        value = job(rank, world)
        dist.barrier()
        if rank == 0:
            (folder / f"{name}.returned.json").write_text(json.dumps(value))
        return 0
    except UserError as error:
        (folder / f"{name}.{rank}.error").write_text(f"UserError: {error}")
        return 2
    except BaseException as error:
        (folder / f"{name}.{rank}.error").write_text(f"{type(error).__name__}: {error}")
        return 1


if __name__ == "__main__":
    for name in sys.argv[2:] or JOBS:
        start(Path(sys.argv[1]), name)
