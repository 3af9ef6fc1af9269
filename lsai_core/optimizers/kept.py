"""What an optimizer holds on to, found by looking into it: a test that a checkpoint gave it back.

An optimizer that is made of others may save some of its states and not load them again, or keep
some where nothing saves them. Its losses would then differ after a checkpoint, without a word.
"""

from typing import Any

import torch
from torch import Tensor


def kept(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """How many tensors it holds, of how many elements: whole ones, of all processes together.

    Parameters, their gradients and what lies in keys of mappings do not count.
    """
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: dict[int, Tensor] = {}
    seen: set[int] = set()

    def look(value: Any) -> None:
        if id(value) in seen or id(value) in parameters:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif isinstance(value, dict):
            for inner in list(value.values()):
                look(inner)
        elif isinstance(value, list | tuple | set):
            for inner in value:
                look(inner)
        elif isinstance(value, torch.optim.Optimizer):
            parameters.update(id(p) for group in value.param_groups for p in group["params"])
            look(vars(value))

    look(optimizer)
    return {"tensors": len(found), "elements": sum(t.numel() for t in found.values())}


def require_same(held: dict[str, int] | None, found: dict[str, int]) -> None:
    """ValueError if an optimizer that has loaded a checkpoint is not the one that was saved.

    `held`: what `kept` found when it was saved, None in checkpoints that do not say it; `found`:
    what it finds now.
    """
    if held is not None and found != held:
        raise ValueError(f"the optimizer kept {held} and restored {found}")


def require_restored(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """ValueError if an optimizer has not each state of the `state_dict` that it has loaded."""
    now = optimizer.state_dict()["state"]
    for number, state in state_dict["state"].items():
        for name, value in state.items():
            own = now.get(number, {}).get(name)
            if isinstance(value, Tensor) and not _equal(own, value):
                raise ValueError(f"the optimizer's {name} of parameter {number} was not restored")


def _equal(own: Any, saved: Tensor) -> bool:
    if not isinstance(own, Tensor) or (own.dtype, own.shape) != (saved.dtype, saved.shape):
        return False
    return torch.equal(own, saved.to(own.device))
