"""What a context run measures: processes, heads, number format, and sweeps of methods over lengths,
in order of importance.

A GPU's rate is the FLOPs of the whole problem over the number of processes and the time of the
slowest. The method `one` is no method: every process alone, on the whole sequence, with the kernel
that the others use; `one_torch` with the kernel of torch's method.
"""

from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from lsai_core.base.errors import hint
from lsai_core.config.model import Tokens
from lsai_core.config.parallel import MOST_PROCESSES
from lsai_core.config.strict import Strict
from lsai_core.config.train import Seconds
from lsai_core.context import METHODS
from lsai_lab.benches.attention.config import BenchConfig, Lengths, Shape

ONE, ONE_TORCH = "one", "one_torch"
ALONE = (ONE, ONE_TORCH)
NAMES = (*ALONE, *METHODS)
Measure = Literal["time", "error", "trace"]


class Point(NamedTuple):
    """What is measured of a method at a length of the whole sequence."""

    measure: Measure
    method: str
    length: int


class Sweep(Strict):
    """Every length by every method: timed, traced by the profiler, or compared with float64."""

    measure: Measure = "time"
    lengths: Lengths
    methods: list[str] | None = Field(None, description="these only; null: the methods of the run")


class ContextBenchConfig(BenchConfig):
    processes: int = Field(
        gt=0,
        le=MOST_PROCESSES,
        description="one GPU each; with one, only `one` and `one_torch` are measured",
    )
    batch: Tokens = 1
    kernel: str = Field(
        "auto",
        description="of one tile, see lsai_core.attention; torch's method brings its own",
    )
    methods: list[str] = Field([*METHODS], min_length=1)
    sweeps: list[Sweep] = Field(
        min_length=1, description="in this order, so that what matters most is measured first"
    )
    point_timeout_s: Seconds = Field(
        60.0, description="a point that takes longer failed; its processes are ended"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in [
            *self.methods,
            *(name for sweep in self.sweeps for name in sweep.methods or []),
        ]:
            if name not in NAMES:
                raise ValueError(f"unknown context-parallel method {name!r}{hint(name, NAMES)}")
        if not self.points():
            raise ValueError("nothing to measure: one process measures `one` and `one_torch` only")
        return self

    def points(self) -> list[Point]:
        """In the order in which they are measured, each once."""
        found = [
            Point(sweep.measure, method, length)
            for sweep in self.sweeps
            for length in sweep.lengths
            for method in sweep.methods or self.methods
            if self.processes > 1 or method in ALONE
        ]
        return list(dict.fromkeys(found))

    def shape(self, length: int) -> Shape:
        """The whole attention problem at a length."""
        return Shape(self.batch, length, self.heads, self.kv_heads, self.head_dim, causal=True)
