"""What a model is: its shape, its attention, and what its blocks keep for the backward pass; named
shapes, and the scaling rule that grows a model in steps.

A preset fills the keys of `ModelConfig` that are not given, so `{preset: lab, n_layers: 2}` is the
lab model with two layers. `scaling_factor: s` builds a shape by rule instead: strategy `all` grows
width, depth and heads together (d = 256 s, layers = 8 s, heads = 8 s), strategy `n_layers` keeps
the shape of s = 1 and grows the layers alone (8 s).
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from lsai_core.base.errors import UserError, hint
from lsai_core.config.affects import Affects, Later
from lsai_core.config.strict import Strict

# Beyond any model or machine: such a number is a slip, and is refused where it is given.
MOST_LAYERS, MOST_WIDTH, MOST_TOKENS = 10_000, 2**20, 2**27
_LAYERS_OF_FACTOR = 8
LARGEST_FACTOR = MOST_LAYERS // _LAYERS_OF_FACTOR
Tokens = Annotated[int, Field(gt=0, le=MOST_TOKENS)]
GradCheckpoint = Literal["none", "selective", "alternating", "attention", "full"]
# What one block does; `mlp`: attention as in `selective`, the feed-forward layer as in `full`.
BlockCheckpoint = Literal["none", "selective", "mlp", "attention", "full"]

PRESETS: dict[str, dict[str, Any]] = {
    "lab": dict(
        n_layers=6,
        d_model=512,
        n_heads=8,
        n_kv_heads=8,
        d_ff=2048,
        vocab_size=10_000,
        rope_theta=1e4,
    ),
    # The lab model at a size that two CPU cores train in seconds; same depth of stack, same
    # sequence length.
    "lab-tiny": dict(
        n_layers=4,
        d_model=128,
        n_heads=4,
        n_kv_heads=4,
        d_ff=512,
        vocab_size=10_000,
        rope_theta=1e4,
    ),
    "course": dict(
        n_layers=32,
        d_model=4096,
        n_heads=32,
        n_kv_heads=8,
        d_ff=14_336,
        vocab_size=131_072,
        rope_theta=5e5,
    ),
    "llama2-7b": dict(
        n_layers=32,
        d_model=4096,
        n_heads=32,
        n_kv_heads=32,
        d_ff=11_008,
        vocab_size=32_000,
        rope_theta=1e4,
    ),
    "llama3-8b": dict(
        n_layers=32,
        d_model=4096,
        n_heads=32,
        n_kv_heads=8,
        d_ff=14_336,
        vocab_size=128_256,
        rope_theta=5e5,
    ),
    "llama3-70b": dict(
        n_layers=80,
        d_model=8192,
        n_heads=64,
        n_kv_heads=8,
        d_ff=28_672,
        vocab_size=128_256,
        rope_theta=5e5,
    ),
    "llama3.2-1b": dict(
        n_layers=16,
        d_model=2048,
        n_heads=32,
        n_kv_heads=8,
        d_ff=8192,
        vocab_size=128_256,
        rope_theta=5e5,
        tie_embeddings=True,
        rope_scaling=dict(factor=32.0),
    ),
}


def scaled_shape(factor: int, strategy: str) -> dict[str, Any]:
    """Shape keys of scaling factor `factor` >= 1 under `strategy` (`all` or `n_layers`)."""
    if factor < 1:
        raise UserError(f"scaling_factor must be at least 1, got {factor}")
    if strategy not in ("all", "n_layers"):
        raise UserError(f"unknown scaling_strategy {strategy!r}; use all or n_layers")
    width = factor if strategy == "all" else 1
    d_model = 256 * width
    return dict(
        n_layers=_LAYERS_OF_FACTOR * factor,
        d_model=d_model,
        n_heads=8 * width,
        n_kv_heads=8 * width,
        d_ff=4 * d_model,
        vocab_size=10_000,
        rope_theta=1e4,
    )


def expand_preset(data: dict[str, Any]) -> dict[str, Any]:
    """Fill the keys that a `preset` or a `scaling_factor` implies; explicit keys win.

    Raises ValueError (pydantic reports it with its place) for an unknown preset.
    """
    data = dict(data)
    factor, strategy = data.pop("scaling_factor", None), data.pop("scaling_strategy", "all")
    if factor is not None:
        try:
            return {
                "preset": f"scaled-{strategy}-{factor}",
                **scaled_shape(factor, strategy),
                **data,
            }
        except UserError as error:
            raise ValueError(str(error)) from None
    name = data.get("preset", "custom")
    if name == "custom" or str(name).startswith("scaled-"):
        return data
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{hint(str(name), PRESETS)}")
    return {**PRESETS[name], **data}


class RopeScaling(Strict):
    """Llama 3.1's stretching of the rotary embeddings to longer contexts; the names are Hugging
    Face's."""

    factor: float = Field(gt=0)
    low_freq_factor: float = Field(1.0, gt=0)
    high_freq_factor: float = Field(4.0, gt=0)
    original_max_position_embeddings: int = Field(8192, gt=0, lt=2**32)

    @model_validator(mode="after")
    def _band_not_empty(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must exceed "
                f"low_freq_factor={self.low_freq_factor}"
            )
        return self


class ModelConfig(Strict):
    """Shape of a Llama-style decoder. `preset` fills what is not given."""

    preset: str = Field("custom", description="name of the preset this shape came from")
    n_layers: int = Field(gt=0, le=MOST_LAYERS)
    d_model: int = Field(gt=0, le=MOST_WIDTH)
    n_heads: int = Field(gt=0, le=MOST_WIDTH)
    n_kv_heads: int = Field(gt=0, le=MOST_WIDTH)
    d_ff: int = Field(gt=0, le=2**22)
    vocab_size: int = Field(gt=0, le=2**24)
    rope_theta: float = Field(1e4, gt=0)
    rope_scaling: RopeScaling | None = None
    norm_eps: float = Field(1e-5, gt=0)
    tie_embeddings: bool = False
    embedding_std: Annotated[float, Affects("result"), Later()] = Field(
        1.0, gt=0, description="of the embedding's first values, unless it is tied"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        return expand_preset(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by n_heads={self.n_heads}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads={self.n_heads} is not divisible by n_kv_heads={self.n_kv_heads}"
            )
        if (self.d_model // self.n_heads) % 2:
            raise ValueError(
                f"head dimension {self.d_model // self.n_heads} must be even for rotary embeddings"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


class AttentionConfig(Strict):
    """Which attention kernel. `window=W`: each position sees itself and the W-1 before it; None is
    full causal attention."""

    backend: str = Field(
        "auto",
        description="a file of lsai_core/attention/backends or techniques/attention, or auto: the "
        "fastest known",
    )
    window: Tokens | None = None


def in_blocks(mode: GradCheckpoint, layers: int) -> list[BlockCheckpoint]:
    """What each block of a model does in `mode`."""
    if mode == "alternating":
        return ["mlp" if index % 2 else "selective" for index in range(layers)]
    return [mode] * layers
