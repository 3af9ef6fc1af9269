"""How many large tensors the operators of eager PyTorch read and write."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class TensorTraffic(TorchDispatchMode):
    """While it is entered, `tensors` counts what operators read and write: each tensor once an
    operator, in units of `size` numbers (much smaller ones count as none)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.tensors = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        touched = {id(each): each for each in [*args, result] if isinstance(each, torch.Tensor)}
        self.tensors += sum(round(each.numel() / self.size) for each in touched.values())
        return result
