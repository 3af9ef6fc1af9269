"""What this project's AdamW optimizers share: one pass over the parameters, each updated by a kernel that also scales its gradient.

The factor is how gradients are clipped: a number on the device, multiplied in as the update reads the gradient. Subclasses say
which moments a parameter has and what updates it. State names are torch's, so that checkpoints of one kind resume with another
that keeps the same moments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Groups = list[dict[str, Any]]


class FactorAdamW(torch.optim.Optimizer):
    """AdamW whose `step` takes a factor for the gradients. Parameters: tensors or DTensors."""

    def __init__(self, groups: Groups, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Fresh moments of a parameter, named so that their alphabetical order is that of the update's arguments."""
        raise NotImplementedError

    def updater(self, weight: Tensor) -> Callable[..., None]:
        """What updates a weight in place: (weight, gradient, *moments, factor, *, step, lr, betas, eps, weight_decay)."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, factor: Tensor | None = None) -> None:  # type: ignore[override]
        """One update with gradients times `factor` (an fp32 scalar on the device; None: 1)."""
        assert closure is None, "this optimizer does not reevaluate the loss"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:  # the count stays on the host: the bias corrections need it there
                    state.update(step=torch.tensor(0.0), **self.moments(parameter))
                state["step"] += 1
                weight = local(parameter)
                if not weight.numel():  # the last ranks of a sharded model may hold nothing of a small tensor
                    continue
                if factor is None:
                    factor = torch.ones((), device=weight.device)
                moments = [local(state[name]) for name in sorted(state) if name != "step"]
                self.updater(weight)(
                    weight, local(parameter.grad), *moments, factor, step=int(state["step"]), lr=group["lr"], betas=group["betas"],
                    eps=group["eps"], weight_decay=group["weight_decay"],
                )  # fmt: skip


def local(tensor: Tensor) -> Tensor:
    """This process's part."""
    from torch.distributed.tensor import DTensor  # a second, in processes that only describe a run

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
