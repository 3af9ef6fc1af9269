"""What processes send each other in a step: as real ones hand it to their collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from ways_memory_job import BASE

from lsai_core.config.strict import deep_merge
from lsai_core.config.train import TrainConfig
from lsai_core.optimizers.build import make_states
from lsai_core.parallel.processes import connect
from lsai_core.prediction.exchanges import exchanges
from lsai_core.training.step import prepare_model, prepare_optimizer, train_step
from lsai_lab.searches import tries

# Blocks enough that what stands outside of them does not matter to the ways that are approximate.
LARGER = {"model": {"n_layers": 24}}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": {"kind": "ddp", "replicate": 2}, "grad_accum": 2},
    "zero1": {"parallel": {"kind": "zero1", "replicate": 2}},
    "zero2": {"parallel": {"kind": "zero2", "fsdp": 2}, "grad_accum": 2},
    "fsdp": {"parallel": {"fsdp": 2}, "grad_accum": 2},
    "tp": {"parallel": {"tp": 2}, "grad_checkpoint": "full"},
    "pp": {"parallel": {"pp": 2}, "grad_accum": 4},
    "ppi": {"parallel": {"pp": 2, "pp_schedule": "interleaved"}, "grad_accum": 4},
    "pp_fsdp": {"parallel": {"pp": 2, "fsdp": 2}, "grad_accum": 4},
}


class Sent(TorchDispatchMode):
    """Counts the bytes that this process must send, by the name of the collective."""

    OPERATIONS = {
        "c10d::_allgather_base_": ("all_gather", 0.5),
        "c10d::_reduce_scatter_base_": ("reduce_scatter", 0.5),
        "c10d::allreduce_": ("all_reduce", 1.0),
        "c10d::broadcast_": ("all_gather", 0.5),  # half of the weights are this process's
        "_c10d_functional::all_gather_into_tensor": ("all_gather", 1.0),  # of its part
        "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0.5),
        "c10d::send": ("send_receive", 1.0),
    }

    def __init__(self) -> None:
        super().__init__()
        self.bytes = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, share = self.OPERATIONS.get(func._schema.name, ("", 0.0))
        if name:
            given = args[1] if "reduce_scatter_base" in func._schema.name else args[0]
            tensors = given if isinstance(given, (list, tuple)) else [given]
            self.bytes[name] += int(sum(share * t.nbytes for t in tensors if isinstance(t, Tensor)))
        return func(*args, **(kwargs or {}))


def one_step(rank: int, name: str) -> dict[str, int]:
    """The bytes that a process, of two in each group, sends in its second step."""
    world, device = connect(torch.device("cpu")), torch.device("cpu")
    config = run_of(name)
    model = prepare_model(config, device)
    optimizer = prepare_optimizer(model, config)
    make_states(optimizer)
    rows = config.batch_size * config.grad_accum
    tokens = torch.randint(config.model.vocab_size, (rows, config.seq_len + 1))
    train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:], config, device)
    with Sent() as sent:
        train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:], config, device)
    world.barrier()
    return dict(sent.bytes)


def run_of(name: str) -> TrainConfig:
    return TrainConfig.model_validate(deep_merge(deep_merge(BASE, LARGER), WAYS[name]))


@pytest.mark.parametrize("name", list(WAYS))
def test_real_processes_send_what_is_predicted(name: str) -> None:
    workers = tries.server(["lsai_core.parallel.build"], on_gpu=False)
    processes = run_of(name).parallel.world_size
    ended, found = tries.attempt(workers, one_step, name, processes=processes, timeout_s=300)
    assert ended["outcome"] == "ok", ended
    expected = Counter[str]()
    for exchange in exchanges(run_of(name)):
        expected[exchange.operation] += int(exchange.sent)
    near = 1e-6 if name in ("fsdp", "zero2") else 0.12
    for operation, size in expected.items():
        assert found[operation] == pytest.approx(size, rel=near), operation
