"""What an optimizer declares, and what the project's own share.

`FactorOptimizer` makes one pass over the parameters, each updated by a kernel that also scales its
gradient. The factor is how gradients are clipped: a number on the device, multiplied in as the
update reads the gradient. Subclasses say which moments a parameter has and what updates it. State
names are torch's, so that checkpoints of one kind resume with another that keeps the same moments.

`Composed` is several optimizers that share a model's parameters.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lsai_core.config.train import TENSOR_CLASSES, TensorClass
from lsai_core.optimizers.rounding import Noise, first_place

if TYPE_CHECKING:
    from lsai_core.config.train import OptimConfig

Groups = list[dict[str, Any]]
Named = dict[str, nn.Parameter]


def _no_choices(optim: OptimConfig) -> str | None:
    if own_update(optim) or optim.kernel == "triton":
        asked = f"states {optim.states} with kernel {optim.kernel} and rounding {optim.rounding}"
        return (
            f"optim.name {optim.name} has no {asked}; use states full, kernel auto, rounding "
            f"nearest, and all of rounded"
        )
    return None


def own_update(optim: OptimConfig) -> bool:
    """Whether a config asks for what only the project's own updates have."""
    return (optim.states, optim.rounding) != ("full", "nearest") or keeps_exact(optim)


def keeps_exact(optim: OptimConfig) -> bool:
    """Whether some bf16 weights are kept in fp32, too."""
    return set(optim.rounded) != set(TENSOR_CLASSES)


def tensor_class(name: str) -> TensorClass:
    """Which class of tensors the parameter of this name belongs to, as `optim.rounded` has them. A
    tied output layer is the embedding."""
    name = name.replace("_orig_mod.", "")  # of compiled modules
    if name.endswith("norm.weight"):
        return "norms"
    known: dict[str, TensorClass] = {"embedding.weight": "embedding", "output.weight": "output"}
    return known.get(name, "matrices")


@dataclass(frozen=True)
class Optimizer:
    """One optimizer, as its file below `kinds/` declares it.

    `build(parameters, optim)`: torch's kind of optimizer over named parameters, one of them
    or several as `Composed`; it follows the `lr` that the loop sets in its groups. What it keeps
    and what an update needs in between is found by running it on tensors without memory.
    `refusal(optim)`: which of the settings it does not have.
    """

    build: Callable[[Named, OptimConfig], torch.optim.Optimizer]
    refusal: Callable[[OptimConfig], str | None] = _no_choices


def decayed(parameters: Named, optim: OptimConfig) -> Groups:
    """Two groups: matrices, to which weight decay applies, and vectors, to which it does not."""
    matrices, vectors = (
        [p for p in parameters.values() if (p.ndim >= 2) is wide] for wide in (True, False)
    )
    return [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


Pieces = Callable[[int, int], list[tuple[int, int]]]


def pieces(rows: int, at_once: int) -> list[tuple[int, int]]:
    """Where the pieces of so many rows begin and end."""
    return [(begin, min(begin + at_once, rows)) for begin in range(0, rows, at_once)]


class FactorOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` takes a factor for the gradients. Parameters: tensors or DTensors.

    `settings` are its hyperparameters, `lr` and `weight_decay` among them, which groups may change.
    `stochastic`: whether bf16 weights are rounded stochastically, with random bits of `seed` and
    the parameters' `numbers` (`rounding.py`), their places in the groups. `exact`: the parameters
    whose state holds their `weight` in fp32, which is updated and of which they are copies.
    `pieces`: how an update of plain operations cuts a tensor.
    """

    stochastic = False
    seed = 0

    def __init__(self, groups: Groups, **settings: Any) -> None:
        self._settings = ("weight_decay", *settings)
        super().__init__(groups, {"weight_decay": 0.0, **settings})
        self.numbers = numbered([self])
        self.exact: frozenset[Tensor] = frozenset()
        self.pieces: Pieces = pieces
        self._first_places: dict[Tensor, int] = {}

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Fresh moments of a parameter, named so that their alphabetical order is that of the
        update's arguments."""
        raise NotImplementedError

    def updater(self, weight: Tensor) -> Callable[..., None]:
        """What updates a weight in place: (weight, gradient, *moments, factor, *, step, noise, and
        the settings)."""
        raise NotImplementedError

    def make_state(self, parameter: Tensor) -> dict[str, Any]:
        """The state of a parameter, made if it has none yet."""
        state = self.state[parameter]
        if not state:  # the count stays on the host: the bias corrections need it there
            state.update(step=torch.tensor(0.0), **self.fresh(parameter))
        return state

    def fresh(self, parameter: Tensor) -> dict[str, Tensor]:
        """All that is kept of a parameter before its first update, without the count of steps."""
        exact = {"weight": parameter.detach().float()} if parameter in self.exact else {}
        return {**self.moments(parameter), **exact}

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
                state = self.make_state(parameter)
                state["step"] += 1
                weight = local(state.get("weight", parameter))
                # the last ranks of a sharded model may hold nothing of a small tensor
                if not weight.numel():
                    continue
                if factor is None:
                    factor = torch.ones((), device=weight.device)
                moments = [local(state[n]) for n in sorted(state) if n not in ("step", "weight")]
                step = int(state["step"])
                self.updater(weight)(
                    weight,
                    local(parameter.grad),
                    *moments,
                    factor,
                    step=step,
                    noise=self._noise(parameter, step),
                    **{name: group[name] for name in self._settings},
                )
                if "weight" in state:
                    local(parameter).copy_(weight)

    def _noise(self, parameter: Tensor, step: int) -> Noise | None:
        if not self.stochastic:
            return None
        if parameter not in self._first_places:
            self._first_places[parameter] = first_place(parameter)
        return Noise(self.seed, step, self.numbers[parameter], self._first_places[parameter])


class Composed(torch.optim.Optimizer):
    """Several optimizers as one: each updates the parameters that it was made with.

    Groups and states are those of the parts, so that a rate set here is theirs, and what is saved
    and loaded is all of it.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            if isinstance(part, FactorOptimizer):
                part.numbers = numbered(self.parts)
        self._join()

    def _join(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.state = defaultdict(dict)
        for part in self.parts:
            self.state.update(part.state)
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update by every part."""
        assert closure is None, "this optimizer does not reevaluate the loss"
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """As `Optimizer.load_state_dict`, each part its own. Raises ValueError if groups lack."""
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(f"{len(groups)} groups of parameters, not {len(self.param_groups)}")
        for part in self.parts:
            own, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            numbers = set(itertools.chain.from_iterable(group["params"] for group in own))
            state = {n: value for n, value in state_dict["state"].items() if n in numbers}
            part.load_state_dict({"state": state, "param_groups": own})
        self._join()


def held_here(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of what this process keeps states of: itself, unless the states of whole
    parameters are spread over processes."""
    held: torch.optim.Optimizer = getattr(optimizer, "held", optimizer)
    return held


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that an optimizer consists of here: itself, unless it is composed."""
    held = held_here(optimizer)
    return held.parts if isinstance(held, Composed) else [held]


def numbered(optimizers: Sequence[torch.optim.Optimizer]) -> dict[Tensor, int]:
    """Every parameter of the optimizers and its number, in the order of their groups."""
    groups = itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
    return {p: n for n, p in enumerate(itertools.chain.from_iterable(g["params"] for g in groups))}


class Coefficients(NamedTuple):
    """The numbers of a step of AdamW, in the order of its kernels; see `coefficients`."""

    keep: float
    rate: float
    new1: float
    beta2: float
    new2: float
    inverse_root: float
    eps: float


def coefficients(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> Coefficients:
    """Of AdamW's step number `step` (from 1), for every way of computing it, to be rounded to fp32:

    m = m + new1 (g - m), v = beta2 v + new2 g g, w = w keep - rate m / (sqrt(v) inverse_root + eps)
    """
    return Coefficients(
        keep=1.0 - lr * weight_decay,
        rate=lr / (1.0 - betas[0] ** step),
        new1=1.0 - betas[0],
        beta2=betas[1],
        new2=1.0 - betas[1],
        inverse_root=(1.0 - betas[1] ** step) ** -0.5,
        eps=eps,
    )


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this process has: all of it, unless FSDP sharded it."""
    from torch.distributed.tensor import DTensor  # a second, in processes that only describe a run

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
