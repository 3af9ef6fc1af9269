"""FSDP2 on a simulated GPU: as this package's own sharded runs are predicted, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from lsai_core import TrainConfig, predict, simulated_gpu
from lsai_core.base.errors import UserError
from lsai_core.config.strict import validated
from lsai_core.model.transformer import shaped
from lsai_core.prediction.gpu_context import SimulatedGpu

GIB, MIB = 2**30, 2**20
BATCH, LENGTH = 4, 1024
LAYERS, MATRIX = 4, 4 * 2048**2


def config_of(ranks: int, precision: str, compiled: bool, **parallel: Any) -> TrainConfig:
    shape = {"n_layers": 4, "d_model": 1024, "n_heads": 8, "n_kv_heads": 2, "d_ff": 2816}
    data = {"model": {**shape, "vocab_size": 8192}, "data": {"vocab_size": 400}}
    settings = {"seq_len": LENGTH, "batch_size": BATCH, "precision": precision, "blocks": "plain"}
    settings |= {"compile": compiled, "parallel": {"fsdp": ranks, **parallel}}
    return validated(TrainConfig, {**data, **settings}, "test")


def as_anybody_writes_it(config: TrainConfig, offload: bool) -> SimulatedGpu:
    """Three steps of the project's own model, sharded by hand as its own trainer shards it."""
    bf16, ranks = config.precision == "bf16", config.parallel.fsdp
    compute = None if bf16 else torch.bfloat16
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    }
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()
    reshard, where = config.parallel.reshard_after_forward, "cpu" if offload else "cuda"
    with simulated_gpu("h100") as gpu:
        dist.init_process_group("nccl", world_size=ranks, rank=0)
        model: Any = shaped(config.model, config.attention)
        model.to(torch.bfloat16 if bf16 else torch.float32)
        for block in model.blocks if config.compile else ():
            block.compile()
        for block in model.blocks[:-1]:
            fully_shard(block, reshard_after_forward=reshard, **options)
        fully_shard(model.blocks[-1], reshard_after_forward=False, **options)
        fully_shard(model.embedding, reshard_after_forward=reshard, **options)
        model.embedding.set_unshard_in_backward(False)
        fully_shard([model.norm, model.output], reshard_after_forward=False, **options)
        fully_shard(model, reshard_after_forward=False, **options)
        model.to_empty(device=where)
        model.init_weights(0, draw_on=where)
        optimizer = torch.optim.AdamW(model.parameters(), fused=not offload)
        ids = torch.randint(400, (BATCH, LENGTH + 1), device="cuda")
        for _ in range(3):
            model(ids[:, :-1], ids[:, 1:]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert not dist.is_initialized()
    return gpu


@pytest.mark.parametrize(
    ("ranks", "precision", "parallel"),
    [
        (2, "bf16", {}),
        (4, "bf16", {}),
        (2, "bf16_autocast", {}),
        (4, "bf16_autocast", {"reshard_after_forward": False}),
        (2, "bf16", {"cpu_offload": True}),
        (2, "bf16", {"compiled": True}),
    ],
)
def test_both_ways_to_predict_a_sharded_run_agree(
    ranks: int, precision: str, parallel: dict[str, Any]
) -> None:
    config = config_of(ranks, precision, **{"compiled": False, **parallel})
    own = predict(config)
    found = as_anybody_writes_it(config, config.parallel.cpu_offload)
    active = own.on_gpu_with(80).allocated / GIB
    assert found.peak_allocated_gib == pytest.approx(active, rel=0.01)
    assert found.peak_reserved_gib == pytest.approx(own.reserved, rel=0.02)


def layers(**options: Any) -> Any:
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def held(model: Any, *, sync: bool) -> int:
    """Bytes of one micro-batch that its gradients keep."""
    before = torch.cuda.memory_allocated()
    model.set_requires_gradient_sync(sync)
    model(torch.randn(8, 2048, device="cuda")).sum().backward()
    return torch.cuda.memory_allocated() - before


def test_weights_states_and_gradients_are_slices_by_hand() -> None:
    for ranks in (2, 4):
        with simulated_gpu("h100"):
            dist.init_process_group("nccl", world_size=ranks, rank=1)
            before = torch.cuda.memory_allocated()
            model = layers()
            assert torch.cuda.memory_allocated() - before == LAYERS * MATRIX // ranks
            assert held(model, sync=True) == LAYERS * MATRIX // ranks
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            optimizer.step()
            assert torch.cuda.memory_allocated() == pytest.approx(
                4 * LAYERS * MATRIX / ranks, rel=1e-3
            )


def test_gradients_that_are_not_reduced_yet_are_whole() -> None:
    with simulated_gpu("h100"):
        dist.init_process_group("nccl", world_size=2, rank=0)
        model = layers(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        assert held(model, sync=False) == LAYERS * MATRIX  # in fp32, as they will be reduced
        assert held(model, sync=False) == 0
        assert held(model, sync=True) == LAYERS * MATRIX // 2 - LAYERS * MATRIX


def test_weights_stay_gathered_until_they_are_resharded() -> None:
    kept = {}
    for reshard in (True, False):
        with simulated_gpu("h100") as gpu:
            dist.init_process_group("nccl", world_size=2, rank=0)
            model = layers(reshard_after_forward=reshard)
            before = torch.cuda.memory_allocated()
            loss = model(torch.randn(8, 2048, device="cuda")).sum()
            kept[reshard] = torch.cuda.memory_allocated() - before
            loss.backward()
        assert gpu.memory["FSDP buffers"] > 0
    assert kept[False] - kept[True] == LAYERS * MATRIX


def test_meshes_of_gpus_have_ranks() -> None:
    with simulated_gpu("h100"):
        dist.init_process_group("nccl", world_size=4, rank=3)
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
        assert mesh.get_coordinate() == [1, 1] or mesh.get_coordinate() == (1, 1)
        assert mesh["shard"].size() == 2 and DeviceMesh("cuda", [0, 1, 2, 3]).size() == 4
        before = torch.cuda.memory_allocated()
        model = layers(mesh=mesh)
        assert torch.cuda.memory_allocated() - before == LAYERS * MATRIX // 2
        assert held(model, sync=True) == LAYERS * MATRIX // 2


def test_offloaded_weights_and_states_are_on_the_host() -> None:
    with simulated_gpu("h100") as gpu:
        dist.init_process_group("nccl", world_size=2, rank=0)
        model = layers(offload_policy=CPUOffloadPolicy())
        assert torch.cuda.memory_allocated() == 0
        optimizer = torch.optim.AdamW(model.parameters())
        assert held(model, sync=True) == 0
        optimizer.step()
        assert torch.cuda.memory_allocated() == 0
    assert gpu.phases["optimizer"] < MIB / GIB


@pytest.mark.parametrize("said", ["whose ranks are a tensor", "tensor parallelism"])
def test_what_is_not_simulated_is_refused_in_one_line(said: str) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with pytest.raises(UserError, match=said) as found, simulated_gpu("h100"):
        dist.init_process_group("nccl", world_size=2, rank=0)
        if said.startswith("whose"):
            DeviceMesh("cuda", torch.arange(2))
        mesh = init_device_mesh("cuda", (2,))
        parallelize_module(nn.Linear(8, 8).cuda(), mesh, ColwiseParallel())
    assert len(str(found.value).splitlines()) == 1
