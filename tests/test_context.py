"""Sequence-parallel attention: plans as data, real gloo processes against float64 attention in one,
and the CUDA kernels."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from context_job import JOBS, OURS, exact, inputs, reference, relative
from torch import Tensor

from lsai_core.attention.choice import get_backend
from lsai_core.attention.registry import TileKernel
from lsai_core.attention.tiles import allowed
from lsai_core.base.errors import UserError
from lsai_core.context import METHODS, ContextSetting
from lsai_core.context.engine import planned_backward, planned_forward
from lsai_core.context.exchange import InFlight, Message, Wait
from lsai_core.context.merge import merge

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
CUDA_KERNELS = ["eager", "sdpa_flash", "sdpa_cudnn", "fa2", "fa4"]


# Messages


def test_the_host_waits_for_the_gpu_once_too_much_is_in_flight() -> None:
    class Event:
        def __init__(self, name: int) -> None:
            self.name = name

        def synchronize(self) -> None:
            happened.append(self.name)

    happened: list[int] = []
    flight = InFlight(limit_bytes=100)
    for name, size in enumerate((60, 40, 30, 30)):
        flight.make_room()
        flight.waited(Event(name), size)
    # 60 + 40 fit, and 30 more were allowed to start
    assert happened == [0] and flight.total_bytes == 100
    flight.waited(Event(4), 500)
    flight.make_room()
    assert happened == [0, 1, 2, 3, 4] and flight.total_bytes == 0


# Plans


@pytest.mark.parametrize("window", [None, 1, 9, 30, 96])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("method", OURS)
def test_a_plan_has_every_allowed_pair_once(method: str, ranks: int, window: int | None) -> None:
    setting = ContextSetting(method, 24 * ranks, window)
    layout, plan = setting.layout(ranks), setting.plan(ranks)
    seen = torch.zeros(layout.length, layout.length, dtype=torch.int64)
    for task in (task for step in plan.steps for task in step):
        rows, columns = layout.ring_positions(task.q_owner), layout.ring_positions(task.k_owner)
        for tile in task.tiles:
            mask = allowed(
                tile.q1 - tile.q0, tile.k1 - tile.k0, tile.left, tile.right, torch.device("cpu")
            )
            mask = torch.ones(tile.q1 - tile.q0, tile.k1 - tile.k0) if mask is None else mask
            assert int(mask.sum()) == tile.pairs and bool(mask.any(-1).all())
            seen[rows[tile.q0 : tile.q1, None], columns[None, tile.k0 : tile.k1]] += mask.long()
    position = torch.arange(layout.length)
    distance = position[:, None] - position[None, :]
    assert torch.equal(seen, ((distance >= 0) & (distance < (window or layout.length))).long())
    assert sum(plan.pairs()) == int(seen.sum())


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_balanced_schedules_give_every_rank_the_same_work(ranks: int) -> None:
    for name in OURS:
        imbalance = ContextSetting(name, 32 * ranks).plan(ranks).imbalance()
        assert (imbalance <= 1.05) == METHODS[name].balanced, (name, imbalance)


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("method", OURS)
def test_slices_go_together_again(method: str, ranks: int) -> None:
    layout = ContextSetting(method, 48).layout(ranks)
    whole = torch.randn(2, 48, 3)
    parts = [layout.shard(whole, rank) for rank in range(ranks)]
    assert torch.equal(layout.unshard(parts), whole)
    assert torch.equal(
        torch.cat([layout.positions(rank) for rank in range(ranks)]).sort().values, torch.arange(48)
    )


def test_lengths_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(
        UserError, match="146 cannot be cut into 8 equal parts over 4 ranks; use 144 or 152"
    ):
        ContextSetting("zigzag", 146).layout(4)


# Real processes


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("context")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("context_job.py")), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert job.returncode == 0, job.stderr
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in JOBS}


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_processes_equal_one_in_float64(jobs: dict[str, dict[str, Any]], world: int) -> None:
    job, one = jobs[f"world-{world}"], jobs["world-1"]["returned"]
    assert job["ended"] == [0] * world, job["errors"]
    for case in job["returned"]:
        tolerance = {"fp64": 1e-14, "fp32": 1e-6, "bf16": 1e-2}[case["dtype"]]
        assert max(case["errors"]) <= tolerance, case
        alike = {name: case[name] for name in ("method", "dtype", "kernel", "window")}
        alone = [other for other in one if {name: other[name] for name in alike} == alike]
        if case["dtype"] != "fp64":  # the error of many ranks is that of one
            assert all(
                a <= 1.5 * b for a, b in zip(case["errors"], alone[0]["errors"], strict=True)
            ), case


def test_a_model_that_shares_its_sequence_is_the_same_model(
    jobs: dict[str, dict[str, Any]],
) -> None:
    job = jobs["model"]
    assert job["ended"] == [0] * 4, job["errors"]
    assert max(job["returned"].values()) <= 1e-12, job["returned"]


def test_refusals_are_one_line_on_every_rank(jobs: dict[str, dict[str, Any]]) -> None:
    job = jobs["refusals"]
    assert job["ended"] == [0] * 4, job["errors"]
    for told in job["returned"]:
        for name, line in told.items():
            assert line.startswith("Unavailable: " if name == "torch" else "UserError: "), (
                name,
                line,
            )
            assert "\n" not in line


@pytest.mark.parametrize("name", ["dies", "wrong"])
def test_no_rank_waits_for_one_that_is_gone(jobs: dict[str, dict[str, Any]], name: str) -> None:
    job = jobs[name]
    assert job["seconds"] < 60 and 0 not in job["ended"]
    if name == "wrong":
        assert job["ended"][1] == 2 and "rank 1 holds 35 positions" in job["errors"][1]
    assert all(error or code < 0 for error, code in zip(job["errors"], job["ended"], strict=True))


# One process that plays all ranks, which is how a single GPU sees a ring


class Threads:
    """An exchange between threads of one process."""

    def __init__(
        self, rank: int, size: int, mail: dict[tuple[int, int], queue.Queue[Tensor]]
    ) -> None:
        self.rank, self.size, self._mail = rank, size, mail

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Wait:
        for peer, tensor in sends:
            self._mail[self.rank, peer].put(tensor.clone())
        waiting = list(receives)

        def wait() -> None:
            while waiting:
                peer, tensor = waiting.pop(0)
                tensor.copy_(self._mail[peer, self.rank].get(timeout=60))

        return wait


def tiles(name: str) -> TileKernel:
    found = get_backend(name).tiles
    assert found is not None
    return found


def play(
    setting: ContextSetting, ranks: int, kernel: TileKernel, whole: list[Tensor]
) -> list[Tensor]:
    """Output, dq, dk, dv of a whole sequence by `ranks` threads (of a ring, without an exchange of
    heads)."""
    layout, plan = setting.layout(ranks), setting.plan(ranks)
    mail = {(a, b): queue.Queue[Tensor]() for a in range(ranks) for b in range(ranks)}
    parts: list[list[Tensor]] = [[] for _ in range(ranks)]

    def run(rank: int) -> None:
        q, k, v, gradient = (layout.shard(x, rank) for x in whole)
        exchange = Threads(rank, ranks, mail)
        out, lse = planned_forward(plan, exchange, kernel, q, k, v)
        parts[rank] = [out, *planned_backward(plan, exchange, kernel, gradient, q, k, v, out, lse)]

    _together([lambda rank=rank: run(rank) for rank in range(ranks)])  # type: ignore[misc]
    return [layout.unshard([part[i] for part in parts]) for i in range(4)]


def _together(calls: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("method", ["ring", "zigzag", "lightseq"])
def test_threads_play_a_ring(method: str) -> None:
    found = play(ContextSetting(method, 144, 40), 8, tiles("eager"), inputs((8, 2)))
    assert max(relative(a, b) for a, b in zip(found, exact((8, 2), 40), strict=True)) <= 1e-14


def cuda_inputs(heads: tuple[int, int], head_dim: int, seq_len: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, seq_len, n, head_dim) for n in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes]


def cuda_exact(whole: list[Tensor], window: int | None) -> list[Tensor]:
    q, k, v, gradient = (x.double().requires_grad_() for x in whole)
    out = reference(q, k, v, window)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v], gradient)]


def one_at_a_time(kernel: TileKernel) -> TileKernel:
    """The kernel for ranks that are threads: FlashAttention 4 must not compile in two of them at
    once."""
    lock = threading.Lock()

    def locked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with lock:
                return function(*args)

        return call

    return TileKernel(locked(kernel.forward), locked(kernel.backward))


def runnable(name: str, window: int | None) -> TileKernel:
    backend = get_backend(name)
    if (reason := backend.missing(torch.device("cuda"))) is not None:
        pytest.skip(f"{name} {reason}")
    if window is not None and "cuda" not in backend.window and name != "sdpa_flash":
        pytest.skip(f"{name} has no window")
    return tiles(name)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CUDA_KERNELS)
def test_cuda_kernels_return_the_log_sum_exp(
    name: str, head_dim: int, heads: tuple[int, int]
) -> None:
    kernel = runnable(name, None)
    q, k, v, gradient = cuda_inputs(heads, head_dim, 512)
    scores = torch.einsum(
        "bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(heads[0] // heads[1], 2)
    )
    scores = (scores / head_dim**0.5).masked_fill(
        torch.ones(512, 512, device="cuda").triu(1).bool(), -torch.inf
    )
    out, lse = kernel.forward(q, k, v, None, 0)
    assert lse.dtype == torch.float32 and lse.shape == (1, heads[0], 512)
    assert float((lse.double() - scores.logsumexp(-1)).abs().max()) <= 1e-3
    found = [out, *kernel.backward(gradient, q, k, v, out, lse.contiguous(), None, 0)]
    assert (
        max(
            relative(a, b)
            for a, b in zip(found, cuda_exact([q, k, v, gradient], None), strict=True)
        )
        <= 1e-2
    )


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_merge_kernel_equals_plain_operations(dtype: torch.dtype) -> None:
    out, part = (
        torch.randn(2, 100, 3, 80, device="cuda"),
        torch.randn(2, 100, 3, 80, device="cuda").to(dtype),
    )
    lse, part_lse = (
        10 * torch.randn(2, 3, 100, device="cuda"),
        10 * torch.randn(2, 3, 100, device="cuda"),
    )
    lse[:, :, 50:] = -torch.inf
    out[:, 50:] = 0
    expected, expected_lse = out.double(), lse.double()  # plain operations serve fp64
    merge(expected[:, 7:90], expected_lse[:, :, 7:90], part[:, 7:90], part_lse[:, :, 7:90].double())
    merge(out[:, 7:90], lse[:, :, 7:90], part[:, 7:90], part_lse[:, :, 7:90])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("method", ["ring", "zigzag", "lightseq"])
@pytest.mark.parametrize("name", CUDA_KERNELS)
def test_cuda_ring_is_as_exact_as_one_kernel(name: str, method: str, window: int | None) -> None:
    kernel, whole = runnable(name, window), cuda_inputs((8, 2), 128, 1024)
    expected = cuda_exact(whole, window)

    def error(ranks: int) -> list[float]:
        found = play(ContextSetting(method, 1024, window), ranks, one_at_a_time(kernel), whole)
        return [relative(a, b) for a, b in zip(found, expected, strict=True)]

    alone = error(1)
    for ranks in (2, 4, 8):
        assert all(a <= 1.5 * b for a, b in zip(error(ranks), alone, strict=True)), ranks
