"""What `test_rounding.py` does elsewhere: `rounding_job.py kernels <device> <file>` runs the Triton
kernels on a GPU, or with TRITON_INTERPRET=1 on a CPU; by torchrun, `rounding_job.py sharded <file>`
updates sharded parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from job_end import leave
from torch import Tensor, nn

from lsai_core.config.train import OptimConfig
from lsai_core.optimizers.adam8bit import moments_of
from lsai_core.optimizers.build import build_optimizer
from lsai_core.optimizers.rounding import LARGEST, Noise

SETTINGS: dict[str, Any] = dict(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
SHAPES = [(7, 5), (64, 24), (13,), (3, 40), (130, 8)]


@dataclass(frozen=True)
class Case:
    """Updates of one tensor; `first` is its first element's place in the whole. `exact`: its weight
    is in fp32, whatever the dtype of gradient and moments."""

    shape: tuple[int, ...]
    first: int = 0
    eight_bit: bool = False
    stochastic: bool = True
    dtype: torch.dtype = torch.bfloat16
    poison: str = ""
    lr: float = 1e-3
    exact: bool = False


CASES = [
    *(Case((70, 130), eight_bit=eight) for eight in (False, True)),
    *(Case((70, 130), stochastic=False, eight_bit=eight) for eight in (False, True)),
    *(Case((5, 300), dtype=torch.float32, eight_bit=eight) for eight in (False, True)),
    *(Case((33, 512), eight_bit=eight, first=2**33 + 16) for eight in (False, True)),
    *(Case((33, 27), eight_bit=eight, first=2**32 - 9) for eight in (False, True)),
    *(Case((10_001,), first=first) for first in (0, 3, 2**40 + 8)),
    *(Case((4, 300), eight_bit=eight, poison="gradient") for eight in (False, True)),
    *(Case((4, 300), eight_bit=eight, poison="weight") for eight in (False, True)),
    Case((4, 300), poison="moments"),
    *(Case((4, 300), poison="largest", lr=lr) for lr in (1e35, 3e35, 8e35)),
    *(Case(shape, exact=True) for shape in ((70, 130), (512,))),
]


def inputs(case: Case) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A weight, its moments, and the gradients of three steps (of one with 8 bits: codes may differ
    at their edges)."""
    generator = torch.Generator().manual_seed(len(case.shape) + case.first % 1000)
    weight = torch.randn(case.shape, generator=generator).to(case.dtype)
    weight = weight.float() if case.exact else weight
    if case.eight_bit:
        moments = list(moments_of(weight).values())
        for codes, scales in (moments[:2], moments[2:]):
            codes.random_(0, 256, generator=generator)
            scales.uniform_(0, 1, generator=generator)
    else:
        moments = [torch.randn(case.shape, generator=generator).to(case.dtype) for _ in range(2)]
        moments[1].abs_()
    spread = 10 ** (4 * torch.rand(case.shape, generator=generator) - 4)
    gradients = [
        (torch.randn(case.shape, generator=generator) * spread).to(case.dtype)
        for _ in range(1 if case.eight_bit else 3)
    ]
    bad = torch.tensor([float("nan"), float("inf"), -float("inf"), LARGEST, -LARGEST, 0.0]).to(
        case.dtype
    )
    if case.poison == "largest":
        weight[0, :2], gradients[0][0, 0], gradients[0][0, 1] = bad[3], -1.0, 1.0
    elif case.poison:
        for tensor in {"gradient": gradients[:1], "weight": [weight], "moments": moments}[
            case.poison
        ]:
            tensor[1, : len(bad)] = bad
            tensor[3, -1] = float("nan")
    return weight, moments, gradients


def updated(case: Case, device: str, update: Callable[..., Callable[..., None]]) -> list[Tensor]:
    """Weight and moments after the steps, in host memory; `update(eight_bit)` gives what
    updates."""
    weight, moments, gradients = inputs(case)
    weight, moments = weight.to(device), [moment.to(device) for moment in moments]
    factor = torch.tensor(0.7, device=device)
    for step, gradient in enumerate(gradients, 5):
        noise = Noise(2**40 + 77, step, 3, case.first) if case.stochastic else None
        update(case.eight_bit)(
            weight,
            gradient.to(device),
            *moments,
            factor,
            step=step,
            lr=case.lr,
            noise=noise,
            **SETTINGS,
        )
    return [weight.cpu(), *(moment.cpu() for moment in moments)]


def mend_interpreter() -> None:
    """Triton's interpreter cuts fp32 off where it converts to bf16; GPUs round to nearest, as torch
    does."""
    from triton.runtime import interpreter

    real = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source.name, target.name) != ("fp32", "bf16"):
            return real(values, source, target, rounding)
        found = torch.from_numpy(values.copy()).view(torch.float32).to(torch.bfloat16)
        return found.view(torch.uint16).numpy().reshape(values.shape)

    interpreter._convert_float = convert


def kernels(device: str, file: Path) -> None:
    if device == "cpu":
        mend_interpreter()
    from lsai_core.optimizers.adamw8_kernel import adamw8_
    from lsai_core.optimizers.adamw_kernel import adamw_

    torch.save(
        [updated(case, device, lambda eight: adamw8_ if eight else adamw_) for case in CASES], file
    )


def parameters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in SHAPES]


def gradients_of(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    return [(0.01 * torch.randn(shape, generator=generator)).to(torch.bfloat16) for shape in SHAPES]


def steps(module: nn.Module, states: str, part: Callable[[nn.Parameter, Tensor], Tensor]) -> None:
    """Five stochastically rounded updates; `part(parameter, gradient)`: the gradient as the
    parameter is sharded."""
    optimizer = build_optimizer(
        module, OptimConfig(lr=1e-4, states=states, rounding="stochastic"), seed=9
    )
    for step in range(5):
        for parameter, gradient in zip(module.parameters(), gradients_of(step), strict=True):
            parameter.grad = part(parameter, gradient)
        optimizer.step()


def sharded(file: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo")
    size = dist.get_world_size()
    meshes = [init_device_mesh("cpu", (size,))]
    if size == 4:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    ends: dict[str, list[Tensor]] = {}
    for mesh in meshes:
        for states in ("full", "8bit"):
            module = nn.ParameterList([nn.Parameter(p) for p in parameters()])
            fully_shard(module, mesh=mesh)
            steps(module, states, lambda p, g: distribute_tensor(g, p.device_mesh, p.placements))  # type: ignore[attr-defined]
            ends[f"{states} {mesh.ndim}"] = [p.full_tensor() for p in module.parameters()]  # type: ignore[attr-defined]
    if dist.get_rank() == 0:
        torch.save(ends, file)
    dist.barrier()  # a process that leaves while another still talks to it can abort that one
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "kernels":
        kernels(sys.argv[2], Path(sys.argv[3]))
    else:
        sharded(Path(sys.argv[2]))
        leave()
