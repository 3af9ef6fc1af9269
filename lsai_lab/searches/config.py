"""What a search is told: which training run, what of it grows, and how far and how finely to
search."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from lsai_core.base.errors import UserError
from lsai_core.config.affects import affecting
from lsai_core.config.model import LARGEST_FACTOR, MOST_LAYERS, ModelConfig, Tokens, scaled_shape
from lsai_core.config.strict import Strict, validated
from lsai_core.config.train import Seconds, Steps, TrainConfig

Grow = Literal["all", "n_layers"]


class SearchConfig(Strict):
    """What every search is told: which training run, and how far and how finely to search."""

    train: TrainConfig
    max_size: Tokens = Field(description="largest size tried")
    resolution: float = Field(
        0.0, ge=0, lt=1, description="stop at this relative width; 0 finds the exact size"
    )
    try_timeout_s: Seconds = 120.0
    budget_s: Seconds = Field(600.0, description="no try but the first begins later than this")
    cpu_limit_gib: float = Field(
        1.0, gt=0, le=2**20, description="on a CPU: what one process of a try may allocate"
    )

    @classmethod
    def from_study(cls, config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        """The row's training config, as far as it affects memory: a new learning rate does not
        repeat the search."""
        row = validated(TrainConfig, config, "the training config of a search")
        return {"train": affecting(row, "memory"), **settings}

    def sized(self, size: int) -> TrainConfig:
        """The run with the size that is searched for."""
        raise NotImplementedError


class BatchSearchConfig(SearchConfig):
    """How far to search."""

    max_size: Tokens = Field(1 << 16, description="largest batch size tried")
    steps: Steps = Field(2, description="optimizer steps per try")

    @classmethod
    def from_study(cls, config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        found = super().from_study(config, settings)
        if TrainConfig.model_validate(config).parallel.distributed:
            advice = (
                "leave out parallel.fsdp and cpu_offload, or measure the other parts alone "
                "(--parts train)"
            )
            raise UserError(f"the search for the largest batch is for one process; {advice}")
        del found["train"]["batch_size"]  # what is searched for
        return found

    def sized(self, size: int) -> TrainConfig:
        # From the second micro-batch on all are alike.
        return self.train.model_copy(
            update={"batch_size": size, "grad_accum": min(2, self.train.grad_accum)}
        )


class ModelSearchConfig(SearchConfig):
    """What is measured, and by what the model grows."""

    measure: Literal["load", "train"] = Field(
        description="load: the weights alone; train: one whole step"
    )
    grow: Grow = Field(
        description="all: the scaling factor; n_layers: the layers of the given model"
    )
    max_size: int = Field(
        MOST_LAYERS,
        gt=0,
        le=MOST_LAYERS,
        description="largest scaling factor or number of layers tried",
    )
    expandable_segments: bool = Field(
        False,
        description="on a GPU: the allocator's setting under which free pieces of memory serve any "
        "size",
    )

    @model_validator(mode="before")
    @classmethod
    def _as_far_as_there_are_shapes(cls, data: Any) -> Any:
        """What grows by the scaling factor ends earlier than what grows by layers."""
        if isinstance(data, dict) and data.get("grow") == "all":
            return {"max_size": LARGEST_FACTOR, **data}
        return data

    @model_validator(mode="after")
    def _largest_has_a_shape(self) -> Self:
        if self.grow == "all" and self.max_size > LARGEST_FACTOR:
            raise ValueError(
                f"max_size={self.max_size}, and a scaling factor is at most {LARGEST_FACTOR}"
            )
        return self

    def sized(self, size: int) -> TrainConfig:
        return grown(self.train, self.grow, size)


def grown(train: TrainConfig, grow: Grow, size: int) -> TrainConfig:
    """The run `train` with a model of that size. `all`: the shape of scaling factor `size`
    (`presets.scaled_shape`); `n_layers`: its own with `size` layers."""
    if grow == "n_layers":
        return train.model_copy(update={"model": train.model.model_copy(update={"n_layers": size})})
    model = ModelConfig.model_validate(
        {"preset": f"scaled-all-{size}", **scaled_shape(size, "all")}
    )
    return train.model_copy(update={"model": model})
