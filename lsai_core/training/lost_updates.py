"""Which share of a step's updates is lost: elements of a weight that are what they were before it.

A bf16 weight that is rounded to nearest loses an update of less than 1/512 to 1/256 of it. Counted
are elements whose first moment is not 0, so that exact arithmetic would move them; that of a row of
the embedding whose token never came is 0. A weight that the optimizer keeps in fp32, too
(`optim.rounded`), loses nothing where its bf16 copy stays.
"""

import torch
from torch import Tensor, nn

from lsai_core.optimizers.base import tensor_class


class LostUpdates:
    """Counts in every step that is a multiple of `every`, from the first multiple on; 0: never."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> None:
        self.model, self.optimizer, self.every = model, optimizer, every
        self._before: dict[str, Tensor] = {}

    def due(self, step: int) -> bool:
        """Whether this step is counted."""
        return self.every > 0 and step > 0 and step % self.every == 0

    @torch.no_grad()
    def before(self, step: int) -> None:
        """Keep the weights as they are before a step that is counted."""
        if self.due(step):
            self._before = {name: w.clone() for name, w in self._weights().items()}

    @torch.no_grad()
    def after(self, step: int) -> dict[str, float]:
        """`lost_<class>`: the share of each class of tensors, for the row of the step; nothing in
        one that is not counted."""
        counts: dict[str, list[Tensor]] = {}
        for name, weight in self._weights().items() if self.due(step) else ():
            moved = self._moments(name) != 0
            lost = (weight == self._before.pop(name)) & moved
            counts.setdefault(tensor_class(name), []).append(torch.stack((lost.sum(), moved.sum())))
        sums = {each: torch.stack(found).sum(0).tolist() for each, found in counts.items()}
        return {f"lost_{each}": lost / max(1, all_) for each, (lost, all_) in sums.items()}

    def _weights(self) -> dict[str, Tensor]:
        """Of each parameter the tensor that its updates go to."""
        states = self.optimizer.state
        named = self.model.named_parameters()
        return {name: states[p].get("weight", p) if p in states else p for name, p in named}

    def _moments(self, name: str) -> Tensor:
        moment: Tensor = self.optimizer.state[self.model.get_parameter(name)]["exp_avg"]
        return moment
