"""One of several processes on a simulated GPU: DistributedDataParallel's buckets, by hand, and what
is refused."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lsai_core import simulated_gpu
from lsai_core.base.errors import UserError
from lsai_core.prediction.buckets import assigned

LAYERS, MATRIX, MIB = 8, 4 * 2048**2, 2**20


def layers() -> nn.Module:
    with torch.device("cuda"):
        return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(LAYERS)))


def after_a_step(**options: Any) -> tuple[int, list[int], Any]:
    """Bytes of the wrapper, and of each of two steps before its gradients go."""
    with simulated_gpu("h100"):
        dist.init_process_group("nccl", world_size=2, rank=1)
        assert (dist.get_rank(), dist.get_world_size()) == (1, 2)
        model = layers()
        before = torch.cuda.memory_allocated()
        parallel = DistributedDataParallel(model, device_ids=[0], **options)
        wrapper, held = torch.cuda.memory_allocated() - before, []
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for _ in range(2):
            x = torch.randn(8, 2048, device="cuda")
            with parallel.no_sync():
                parallel(x).sum().backward()
            parallel(x).sum().backward()
            dist.all_reduce(x)
            optimizer.step()
            held.append(torch.cuda.memory_allocated() - before - x.nbytes)
            optimizer.zero_grad()
            del x
    return wrapper, held, parallel


def test_buckets_hold_all_gradients_once_more() -> None:
    wrapper, held, parallel = after_a_step()
    assert wrapper == LAYERS * MATRIX
    assert held == [2 * LAYERS * MATRIX] * 2
    assert not dist.is_initialized()
    # rebuilt: the first is closed by one matrix of 16 MiB, the others by two
    sizes = [flat.numel() * 4 // MATRIX for flat in parallel.simulated.flat]
    assert sizes == [1, 2, 2, 2, 1]


def test_gradients_can_be_parts_of_the_buckets() -> None:
    wrapper, held, _ = after_a_step(gradient_as_bucket_view=True)
    assert wrapper == LAYERS * MATRIX and held == [LAYERS * MATRIX] * 2


def test_gradients_that_are_not_summed_yet_are_beside_the_buckets() -> None:
    with simulated_gpu("h100"):
        dist.init_process_group("nccl", world_size=2, rank=0)
        parallel = DistributedDataParallel(layers(), gradient_as_bucket_view=True)
        x = torch.randn(8, 2048, device="cuda")
        before = torch.cuda.memory_allocated()
        with parallel.no_sync():
            parallel(x).sum().backward()
        assert torch.cuda.memory_allocated() - before == LAYERS * MATRIX
        parallel(x).sum().backward()
        assert torch.cuda.memory_allocated() == before


def test_parameters_are_sent_in_flat_copies() -> None:
    with simulated_gpu("h100"):
        dist.init_process_group("gloo")
        model = layers()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        DistributedDataParallel(model)
        assert torch.cuda.max_memory_allocated() == before + LAYERS * MATRIX
        assert torch.cuda.memory_allocated() == before


def test_buckets_close_at_their_limits_and_hold_one_dtype() -> None:
    wide = [torch.empty(100, device="meta") for _ in range(5)]
    half = [torch.empty(100, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    found = assigned([wide[0], half[0], *wide[1:], *half[1:]], [400, 800])
    assert [[len(group), group[0].dtype] for group in found] == [
        *([1, torch.float32], [2, torch.float32], [2, torch.float32]),
        *([2, torch.bfloat16], [1, torch.bfloat16]),
    ]


def sharded_as_before(_: Any) -> None:
    wrapper = importlib.import_module("torch.distributed.fsdp").FullyShardedDataParallel
    wrapper(nn.Linear(2, 2).cuda())


def flexible(x: Any) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    flex_attention(*3 * [x.view(1, 1, 8, 8)])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (sharded_as_before, "FullyShardedDataParallel"),
        (lambda _: nn.DataParallel(nn.Linear(2, 2)), "DataParallel"),
        (lambda _: DistributedDataParallel(nn.Linear(2, 2)), "init_process_group first"),
        (flexible, "flex_attention"),
    ],
)
def test_what_is_not_simulated_is_refused_in_one_line(
    call: Callable[[Any], Any], said: str
) -> None:
    with pytest.raises(UserError, match=said) as found, simulated_gpu("h100"):
        call(torch.randn(8, 8, device="cuda"))
    assert len(str(found.value).splitlines()) == 1
    assert not dist.is_initialized()
