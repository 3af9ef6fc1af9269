"""What an optimizer declares, and what this project's own share: one pass over the parameters, each
updated by a kernel that also scales its gradient.

The factor is how gradients are clipped: a number on the device, multiplied in as the update reads
the gradient. Subclasses say which moments a parameter has and what updates it. State names are
torch's, so that checkpoints of one kind resume with another that keeps the same moments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lsai_core.config.train import OptimConfig

Groups = list[dict[str, Any]]


def _no_choices(optim: OptimConfig) -> str | None:
    if (optim.states, optim.rounding) != ("full", "nearest") or optim.kernel == "triton":
        asked = f"states {optim.states} with kernel {optim.kernel} and rounding {optim.rounding}"
        return (
            f"optim.name {optim.name} has no {asked}; use states full, kernel auto, rounding "
            f"nearest"
        )
    return None


@dataclass(frozen=True)
class Optimizer:
    """One optimizer, as its file below `optimizers/` declares it.

    `build(groups, optim, device)`: torch's kind of optimizer over groups of parameters (with
    `weight_decay` each); it follows the `lr` that the loop sets in its groups. `states(parameter,
    optim)`: the tensors that it keeps of a parameter, fresh, by name; they tell checkpoints,
    predictions and searches what it takes. `refusal(optim)`: which of the settings it does not
    have.
    """

    build: Callable[[Groups, OptimConfig, torch.device], torch.optim.Optimizer]
    states: Callable[[Tensor, OptimConfig], dict[str, Tensor]]
    refusal: Callable[[OptimConfig], str | None] = _no_choices


class FactorOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` takes a factor for the gradients. Parameters: tensors or DTensors.

    `settings` are its hyperparameters, `lr` and `weight_decay` among them, which groups may change.
    `stochastic`: how the kernels round bf16 weights, where there is a choice.
    """

    stochastic = False

    def __init__(self, groups: Groups, **settings: Any) -> None:
        self._settings = ("weight_decay", *settings)
        super().__init__(groups, {"weight_decay": 0.0, **settings})

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Fresh moments of a parameter, named so that their alphabetical order is that of the
        update's arguments."""
        raise NotImplementedError

    def updater(self, weight: Tensor) -> Callable[..., None]:
        """What updates a weight in place: (weight, gradient, *moments, factor, *, step, and the
        settings)."""
        raise NotImplementedError

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, factor: Tensor | None = None
    ) -> None:
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
                # the last ranks of a sharded model may hold nothing of a small tensor
                if not weight.numel():
                    continue
                if factor is None:
                    factor = torch.ones((), device=weight.device)
                moments = [local(state[name]) for name in sorted(state) if name != "step"]
                settings = {
                    "step": int(state["step"]),
                    **{name: group[name] for name in self._settings},
                }
                self.updater(weight)(weight, local(parameter.grad), *moments, factor, **settings)


def local(tensor: Tensor) -> Tensor:
    """This process's part."""
    from torch.distributed.tensor import DTensor  # a second, in processes that only describe a run

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
