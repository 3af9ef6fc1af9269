"""What an attention run measures: heads, number format, and sweeps of one mask over lengths; and
the FLOPs of a shape.

They are those of the pairs that the mask lets through (DESIGN.md, "Attention speed"): a kernel that
computes what the mask throws away shows a lower rate, and recomputation does not count.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

import torch
from pydantic import AfterValidator, Field, model_validator

from lsai_core.attention.choice import BACKENDS
from lsai_core.base.errors import hint
from lsai_core.config.model import MOST_TOKENS, MOST_WIDTH, Tokens
from lsai_core.config.strict import Strict
from lsai_core.config.train import MOST_SECONDS, Seconds

BACKWARD_FLOPS = 2.5  # of the forward pass's: five products instead of two


def _ascending(lengths: list[int]) -> list[int]:
    if sorted(set(lengths)) != lengths or lengths[0] < 2:
        raise ValueError(f"lengths must ascend from at least 2, got {lengths}")
    return lengths


def _known(names: list[str]) -> list[str]:
    if unknown := [name for name in names if name not in BACKENDS]:
        raise ValueError(f"unknown attention backend {unknown[0]!r}{hint(unknown[0], BACKENDS)}")
    return names


# In ascending order the shorter ones tell what the longer ones will take.
Lengths = Annotated[list[Tokens], Field(min_length=1), AfterValidator(_ascending)]
Backends = Annotated[list[str], AfterValidator(_known)]


class Sweep(Strict):
    """One mask at several lengths by every backend: timed, or compared with float64."""

    measure: Literal["time", "error"] = "time"
    mask: Literal["causal", "full"] | Annotated[int, Field(le=MOST_TOKENS)] = Field(
        description="an integer is a causal window of so many positions"
    )
    lengths: Lengths
    backends: Backends | None = Field(None, description="these only; null: the backends of the run")

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        if isinstance(self.mask, int) and not 0 < self.mask < self.lengths[0]:
            raise ValueError(
                f"a window of {self.mask} restricts nothing at length {self.lengths[0]}"
            )
        return self


class BenchConfig(Strict):
    """Which heads, in which number format, where and how long: the part that every bench of
    attention has."""

    heads: int = Field(gt=0, le=MOST_WIDTH)
    kv_heads: int = Field(gt=0, le=MOST_WIDTH)
    head_dim: int = Field(gt=0, le=MOST_WIDTH)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = Field(0, ge=0, lt=2**32)
    point_ms: float = Field(
        50.0,
        gt=0,
        le=1e3 * MOST_SECONDS,
        description="time to repeat one point in; short calls three times at least",
    )
    max_call_s: Seconds = Field(
        4.0, description="no forward plus backward expected to take longer is started"
    )
    budget_s: Seconds = Field(300.0, description="after so much measuring no new point is started")

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not divisible by kv_heads={self.kv_heads}")
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class Shape:
    """One attention problem."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: int | None = None

    @property
    def mask(self) -> str:
        return "window" if self.window is not None else "causal" if self.causal else "full"

    @property
    def forward_flops(self) -> float:
        """Of the forward pass's two matrix products."""
        length, reach = self.length, self.length if self.window is None else self.window
        pairs = length * reach - reach**2 / 2 if self.causal else length**2
        return 4.0 * self.batch * self.heads * self.head_dim * pairs


class AttentionBenchConfig(BenchConfig):
    tokens: Tokens = Field(16384, description="of a batch: max(1, tokens // length) sequences")
    backends: Backends = Field(list(BACKENDS), min_length=1)
    sweeps: list[Sweep] = Field(
        description="in this order, so that what matters most is measured first"
    )

    def shape(self, sweep: Sweep, length: int) -> Shape:
        """The shape of a sweep at one of its lengths."""
        batch, window = (
            max(1, self.tokens // length),
            sweep.mask if isinstance(sweep.mask, int) else None,
        )
        return Shape(
            batch, length, self.heads, self.kv_heads, self.head_dim, sweep.mask != "full", window
        )
