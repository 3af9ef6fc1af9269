"""PyTorch's own MemTracker (`torch.distributed._tools.mem_tracker`) under fake tensors, as its
documentation has it: model, optimizer and inputs are registered, some steps run, and the largest
sum of live tensors is its answer. It knows neither an allocator nor what libraries take.

Of this package's runs it sees the real training step on the stand-ins for a GPU's kernels that our
own prediction uses (`lsai_core.prediction.fake_kernels`): without a GPU there are no others. So
that comparison is of two ways to count the same tensors.

Other people's steps (`tests/anybody.py`) run as they are, as if on the CPU. Two things are done for
it, for fake tensors have no values and their modules do not move: `item` gives 1, `Module.to`
nothing.
"""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import anybody
import torch
from rivals import Asked, Said
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from lsai_core.config.precision import weight_dtype
from lsai_core.config.train import TrainConfig
from lsai_core.kernels import FakeGpu
from lsai_core.model.transformer import Transformer, shaped
from lsai_core.optimizers.build import make_states
from lsai_core.parallel.adapt import adapt
from lsai_core.prediction.fake_kernels import FusedRMSNorm, attention_as, update_on_gpu
from lsai_core.training import step

GIB = 2**30
CPU = torch.device("cpu")
STEPS = 2  # of a program: states of the optimizer are there from the second on


def of_run(asked: Asked) -> Said:
    """What it says of a run of this package."""
    config, count = asked.config, asked.config.batch_size * asked.config.grad_accum
    model = _model(config, asked.kernel or "fused")
    with FakeGpu(allow_non_fake_inputs=True):
        model.to_empty(device=CPU)
        optimizer = step.prepare_optimizer(model, config)
        make_states(optimizer, update=False)
        tokens = torch.empty(count, config.seq_len + 1, dtype=torch.int64)

        def one_step() -> None:
            given = model, optimizer, tokens[:, :-1], tokens[:, 1:], config, CPU
            step.train_step(*given, update=update_on_gpu)

        return _tracked(one_step, [model, optimizer, tokens], steps=1)


def _model(config: TrainConfig, kernel: str) -> Transformer:
    model = shaped(config.model, config.attention, grad_checkpoint=config.grad_checkpoint)
    model.to(weight_dtype(config.precision))
    adapt(model, config)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.__class__ = FusedRMSNorm
    for block in model.blocks:
        block.attention.attend = attention_as(kernel)
    return model


def of_program(name: str) -> dict[str, Any]:
    """What it says of a step of `tests/anybody.py`, or how it fails: `Said`, as a dict."""
    no_value = mock.patch.object(Tensor, "item", lambda self: 1.0)
    no_move = mock.patch.object(nn.Module, "to", lambda self, *_args, **_named: self)
    try:
        with no_value, no_move, FakeTensorMode(allow_non_fake_inputs=True):
            one_step = anybody.CONFIGURATIONS[name]("cpu")
            return _tracked(one_step, _reached(one_step, set()), STEPS)._asdict()
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
        return Said(None, failed=said)._asdict()


def _tracked(one_step: anybody.Step, registered: list[Any], steps: int) -> Said:
    tracker = MemTracker()
    tracker.track_external(*registered)
    with tracker:
        for _ in range(steps):
            one_step()
            tracker.reset_mod_stats()
    peaks = tracker.get_tracker_snapshot("peak")
    return Said(sum(peak["Total"] for peak in peaks.values()) / GIB)


def _reached(value: Any, seen: set[int]) -> list[Any]:
    """Models, optimizers and tensors that a function holds on to."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, (nn.Module, torch.optim.Optimizer, Tensor)):
        return [value]
    inner: list[Any] = []
    if isinstance(value, types.FunctionType):
        inner = [cell.cell_contents for cell in value.__closure__ or ()]
    elif isinstance(value, (list, tuple)):
        inner = list(value)
    return [found for each in inner for found in _reached(each, seen)]
