"""What changes on many nodes: the formulas by hand, and what they predict against what real
processes send."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from conftest import CHECKOUT
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lsai_core.base.errors import UserError
from lsai_core.config.model import ModelConfig
from lsai_core.config.parallel import ParallelConfig
from lsai_core.config.strict import validated
from lsai_core.config.train import DataConfig, TrainConfig
from lsai_core.model.transformer import count_parameters
from lsai_lab.analysis.scale import (
    Assumptions,
    ScaleConfig,
    bytes_per_weight,
    groupings,
    scale_config,
    state_bytes,
    step_seconds,
    step_traffic,
)
from lsai_lab.searches import tries

TINY = {"n_layers": 2, "d_model": 8, "n_heads": 2, "n_kv_heads": 1, "d_ff": 16, "vocab_size": 32}


def model(**changes) -> ModelConfig:
    return validated(ModelConfig, {**TINY, **changes}, "test")


def test_traffic_by_hand():
    # A block: q and o 8x8, k and v 4x8, three of 16x8, two norms of 8; nothing needs padding over
    # two processes.
    block, table, end = 2 * 64 + 2 * 32 + 3 * 128 + 16, 32 * 8, 8 + 32 * 8
    total = 2 * block + table + end
    assert total == count_parameters(model()).total
    traffic = step_traffic(model(), 2, 4)
    # bf16; the last block, the table and the last unit are gathered once
    assert traffic.bytes["all_gather"] == 2 * (2 * block + block + table + end)
    assert traffic.bytes["reduce_scatter"] == 4 * total  # fp32
    assert traffic.bytes["all_reduce"] == 4 * total // 2
    assert traffic.calls == {"all_gather": 5, "reduce_scatter": 4, "all_reduce": 4}
    assert traffic.sent["reduce_scatter"] == 4 * total / 2
    assert traffic.sent["all_reduce"] == pytest.approx(2 * 3 / 4 * 4 * total / 2)
    assert state_bytes(model(), 2) == 16 * total / 2
    assert bytes_per_weight("bf16_autocast") == (4, 12)  # gradient and two moments in fp32
    assert bytes_per_weight("bf16") == (2, 6)
    # two moments of a byte, and one scale of 4 bytes each for 256 of them
    assert bytes_per_weight("bf16", "8bit") == (2, 2 + 2 * (1 + 4 / 256))
    assert step_traffic(model(), 2, 1).bytes["all_reduce"] == 0
    assert step_traffic(model(tie_embeddings=True), 2, 1).calls["all_gather"] == 4


def test_slices_are_padded_to_equal_size():
    # Over 32 processes qkv (16 x 8), o (8 x 8) and the MLP's output (8 x 16) get 32 rows, each norm
    # of 8 gets 32 entries.
    block = 2 * 32 * 8 + 32 * 8 + 32 * 16 + 2 * 32  # the MLP's fused input has 32 rows already
    assert step_traffic(model(), 32, 1).bytes["reduce_scatter"] == 4 * (2 * block + 2 * 32 * 8 + 32)


def test_time_within_a_node_and_beyond():
    assume = Assumptions(
        gpus_per_node=2,
        nvlink_gb_per_s=100.0,
        network_gb_per_s=10.0,
        nvlink_latency_us=1.0,
        network_latency_us=10.0,
    )
    inside, across, hybrid = (
        step_traffic(model(), 2, 1),
        step_traffic(model(), 4, 1),
        step_traffic(model(), 2, 2),
    )
    sent = inside.sent["all_gather"] + inside.sent["reduce_scatter"]
    assert step_seconds(inside, assume) == pytest.approx((sent / 100e9, 9 * 1 * 1e-6))
    sent = across.sent["all_gather"] + across.sent["reduce_scatter"]
    # two adapters a node
    assert step_seconds(across, assume) == pytest.approx((sent / 20e9, 9 * 3 * 10e-6))
    bandwidth, latency = step_seconds(hybrid, assume)
    assert bandwidth == pytest.approx(
        step_seconds(inside, assume)[0] + hybrid.sent["all_reduce"] / 10e9
    )
    assert latency == pytest.approx(9e-6 + 4 * 2 * 10e-6)


class CollectiveBytes(TorchDispatchMode):
    """Counts, while active, the bytes of the full buffer of every collective of this thread and how
    often each is called."""

    OPS = {
        "c10d::_allgather_base_": ("all_gather", 0),  # its output
        "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),  # its input
        "c10d::allreduce_": ("all_reduce", 0),
    }

    def __init__(self) -> None:
        super().__init__()
        self.found = {
            f"{name}_{what}": 0 for name, _ in self.OPS.values() for what in ("bytes", "calls")
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if known := self.OPS.get(func._schema.name):
            name, position = known
            buffers = (
                args[position] if isinstance(args[position], (list, tuple)) else [args[position]]
            )
            self.found[f"{name}_bytes"] += sum(
                buffer.numel() * buffer.element_size() for buffer in buffers
            )
            self.found[f"{name}_calls"] += 1
        return func(*args, **(kwargs or {}))


def one_step(rank: int, argument: tuple[ModelConfig, int, int]) -> dict[str, float]:
    """One process's FSDP2 step: bytes and calls by collective."""
    from lsai_core.parallel.build import build_sharded
    from lsai_core.parallel.processes import connect

    shape, shard, replicate = argument
    world = connect(torch.device("cpu"))
    data, parallel = (
        DataConfig(vocab_size=shape.vocab_size),
        ParallelConfig(fsdp=shard, replicate=replicate),
    )
    train = TrainConfig(
        model=shape, data=data, precision="bf16_autocast", device="cpu", parallel=parallel
    )
    model = build_sharded(train, torch.device("cpu"))
    tokens_BS = torch.randint(shape.vocab_size, (1, 33))
    # the first step connects the processes
    for counted in (contextlib.nullcontext(), counter := CollectiveBytes()):
        world.barrier()
        with counted:
            logits_BSV = model(tokens_BS[:, :-1])
            F.cross_entropy(logits_BSV.flatten(0, 1).float(), tokens_BS[:, 1:].flatten()).backward()
    world.barrier()
    return counter.found


@pytest.mark.parametrize(("shard", "replicas"), [(4, 1), (2, 2)])
def test_real_processes_send_what_is_predicted(shard: int, replicas: int) -> None:
    small = model(n_layers=1, d_model=64, n_kv_heads=1, d_ff=126, vocab_size=510)
    workers = tries.server(["lsai_core.parallel.build"], on_gpu=False)
    ended, measured = tries.attempt(
        workers, one_step, (small, shard, replicas), processes=shard * replicas, timeout_s=300
    )
    assert ended["outcome"] == "ok", ended
    traffic = step_traffic(small, shard, replicas)
    even = step_traffic(small, 2, 1).bytes["reduce_scatter"]
    assert (traffic.bytes["reduce_scatter"] > even) == (shard == 4), (
        "four processes pad this model, two do not"
    )
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        assert measured[f"{name}_bytes"] == traffic.bytes[name], name
        assert measured[f"{name}_calls"] == traffic.calls[name], name


def test_what_is_computed_is_read_and_a_wrong_value_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    given = scale_config().model_dump()
    assert (
        count_parameters(validated(ModelConfig, given["shapes"]["llama3-70b"], "test")).total
        == 70_553_706_496
    )
    with pytest.raises(UserError, match="mfu") as error:
        validated(ScaleConfig, {**given, "assume": {"mfu": 40}}, "test")
    assert "\n" not in str(error.value)


def test_groupings() -> None:
    config = validated(
        ScaleConfig, {"shapes": {"s": TINY}, "nodes": [1, 4], "shard_nodes": [1, 2, 3]}, "test"
    )
    groups = groupings(config, config.assume)
    assert list(zip(groups["nodes"], groups["shard"], groups["replicas"], strict=True)) == [
        (1, 4, 1),
        (4, 16, 1),
        (4, 4, 4),
        (4, 8, 2),
    ], "three nodes do not divide four; one node of one is FSDP over all"
    assert (groups["share"] * groups["compute_s"]).tolist() == pytest.approx(
        groups["communication_s"].tolist()
    )
