"""Matrix products in fp8: which recipes there are, whether this machine has them, and how a model
is converted."""

from lsai_core.fp8.recipes import (
    available_recipes,
    begin_step,
    context,
    convert,
    end_step,
    facts,
    missing,
    require,
)
from lsai_core.fp8.shapes import linear_shapes

__all__ = [
    "available_recipes",
    "begin_step",
    "context",
    "convert",
    "end_step",
    "facts",
    "linear_shapes",
    "missing",
    "require",
]
