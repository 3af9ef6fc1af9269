"""What a program asks of a simulated GPU that is not there: the values of tensors, and files of
them. The first of a kind is told in a line, all are counted. What a program has saved it can load:
tensors of the same shapes and dtypes."""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

# What gives a program values of a tensor.
READS = (
    Tensor.item,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__format__,
    Tensor.__index__,
    Tensor.__int__,
)
_TORCH, _HERE = Path(torch.__file__).parent, Path(__file__).parent
# What stands between a program and what it asks.
_BETWEEN = (*(str(_TORCH / name) for name in ("_tensor.py", "overrides.py")), str(_HERE))
_LIBRARIES = ("site-packages", "dist-packages")


class NoValues:
    """`reads`: how often the program itself, and no library of it, asked for values. `peaks`: how
    often for what `torch.cuda` counts."""

    def __init__(self) -> None:
        self.reads = self.peaks = 0
        self._told: set[str] = set()
        self._saved: dict[object, Any] = {}

    def read(self) -> None:
        """Called where a program gets a value."""
        if _asks_itself():
            self.reads += 1
            self._tell("simulated_gpu has no values: .item(), float() and comparisons see zeros")

    def save(self, given: Any, file: Any, *_arguments: Any, **_options: Any) -> None:
        """`torch.save`, which keeps no memory alive but a whole module's."""
        self._tell("simulated_gpu has no values: torch.save writes nothing")
        meta = functools.partial(torch.empty_like, device="meta")
        self._saved[_name_of(file)] = tree_map_only(Tensor, meta, given)

    def load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.load`: `original`, but for what was saved here."""

        @functools.wraps(original)
        def load(file: Any, map_location: Any = None, *arguments: Any, **options: Any) -> Any:
            if (name := _name_of(file)) not in self._saved:
                return original(file, map_location, *arguments, **options)
            place = "cpu" if str(map_location) == "cpu" else "cuda"
            made = functools.partial(torch.empty_like, device=place)
            found = tree_map_only(Tensor, made, self._saved[name])
            return tree_map_only(nn.Module, copy.deepcopy, found)

        return load

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            print(line, file=sys.stdout if "IPython" in sys.modules else sys.stderr)


def _name_of(file: Any) -> object:
    """What a file is known by: its path, or itself where it has none."""
    path = getattr(file, "name", file)
    return os.path.realpath(path) if isinstance(path, str | os.PathLike) else id(file)


def _asks_itself() -> bool:
    """Whether a value is asked for by a file that belongs to no installed package."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    name = frame.f_code.co_filename
    is_ours = name.startswith(str(_HERE.parent))
    return not is_ours and not any(part in _LIBRARIES for part in Path(name).parts)
