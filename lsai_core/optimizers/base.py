"""What an optimizer declares, and what this project's own share: one pass over the parameters, each
updated by a kernel that also scales its gradient.

The factor is how gradients are clipped: a number on the device, multiplied in as the update reads
the gradient. Subclasses say which moments a parameter has and what updates it. State names are
torch's, so that checkpoints of one kind resume with another that keeps the same moments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lsai_core.optimizers.rounding import Noise, first_place

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
    `stochastic`: whether bf16 weights are rounded stochastically, with random bits of `seed`
    (`rounding.py`); a parameter's number is its place in the groups.
    """

    stochastic = False
    seed = 0

    def __init__(self, groups: Groups, **settings: Any) -> None:
        self._settings = ("weight_decay", *settings)
        super().__init__(groups, {"weight_decay": 0.0, **settings})
        self._first_places: dict[Tensor, int] = {}

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Fresh moments of a parameter, named so that their alphabetical order is that of the
        update's arguments."""
        raise NotImplementedError

    def updater(self, weight: Tensor) -> Callable[..., None]:
        """What updates a weight in place: (weight, gradient, *moments, factor, *, step, noise, and
        the settings)."""
        raise NotImplementedError

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, factor: Tensor | None = None
    ) -> None:
        """One update with gradients times `factor` (an fp32 scalar on the device; None: 1)."""
        assert closure is None, "this optimizer does not reevaluate the loss"
        numbers = itertools.count()
        for group in self.param_groups:
            for parameter, number in zip(group["params"], numbers, strict=False):
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
                settings["noise"] = (
                    self._noise(parameter, number, settings["step"]) if self.stochastic else None
                )
                self.updater(weight)(weight, local(parameter.grad), *moments, factor, **settings)

    def _noise(self, parameter: Tensor, number: int, step: int) -> Noise:
        if parameter not in self._first_places:
            self._first_places[parameter] = first_place(parameter)
        return Noise(self.seed, step, number, self._first_places[parameter])


def coefficients(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> tuple[float, ...]:
    """The numbers of AdamW's step number `step` (from 1), which every way of computing it takes,
    rounded to fp32:

    keep (of the weight), rate, new1 (share of the gradient in the first moment), beta2, new2,
    inverse_root, eps: w = w keep - rate m / (sqrt(v) inverse_root + eps).
    """
    rate = lr / (1.0 - betas[0] ** step)
    inverse_root = (1.0 - betas[1] ** step) ** -0.5
    return (
        1.0 - lr * weight_decay,
        rate,
        1.0 - betas[0],
        betas[1],
        1.0 - betas[1],
        inverse_root,
        eps,
    )


def local(tensor: Tensor) -> Tensor:
    """This process's part."""
    from torch.distributed.tensor import DTensor  # a second, in processes that only describe a run

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
