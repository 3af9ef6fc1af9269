"""What the benches of a machine are told: its ceilings, the matrix products of a model, messages
between processes."""

from typing import Annotated, Literal

from pydantic import Field

from lsai_core.config.model import MOST_WIDTH, ModelConfig, Tokens
from lsai_core.config.parallel import MOST_PROCESSES
from lsai_core.config.strict import Strict
from lsai_core.config.train import Seconds

Width = Annotated[int, Field(gt=0, le=MOST_WIDTH)]
Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_receive"]
OPERATIONS: tuple[Operation, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_receive",
)
Bytes = Annotated[int, Field(gt=0, le=2**40)]


class CeilingsConfig(Strict):
    """How long to measure, in seconds, and on what."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    budget_s: Seconds = 8.0


class GemmConfig(Strict):
    """Whose linear layers, over how many tokens, and for how long."""

    model: ModelConfig
    tokens: list[Tokens] = Field(
        [8192, 4096], min_length=1, description="the first is measured in every way"
    )
    squares: list[Width] = Field([4096, 8192, 16_384], description="n of the n x n x n products")
    point_s: Seconds = Field(0.3, description="seconds of each point")
    budget_s: Seconds = Field(60.0, description="points that would begin later are skipped")
    device: Literal["auto", "cpu", "cuda"] = "auto"


class CollectivesConfig(Strict):
    """Between how many processes, which messages, and for how long."""

    processes: int = Field(2, gt=1, le=MOST_PROCESSES, description="one GPU each")
    operations: tuple[Operation, ...] = Field(OPERATIONS, min_length=1, strict=False)
    bytes: list[Bytes] = Field(
        [2**power for power in (28, 30, 26, 24, 22, 20, 18, 16, 31)],
        min_length=1,
        description="of a message, in this order, so that what matters most comes first",
    )
    beside: bool = Field(True, description="also beside matrix products")
    product: int = Field(4096, gt=0, le=MOST_WIDTH, description="n of the n x n x n products")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    point_ms: float = Field(200.0, gt=0, le=1e6, description="time to repeat one point in")
    budget_s: Seconds = Field(240.0, description="points that would begin later are skipped")
