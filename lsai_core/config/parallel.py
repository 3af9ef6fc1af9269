"""Over how many processes a run is spread, and how they share the model."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from lsai_core.config.affects import LATER, STEP
from lsai_core.config.strict import Strict

ContextMethod = Literal["ring", "zigzag", "lightseq", "ulysses", "usp", "torch"]
ParallelKind = Literal["fsdp", "zero2", "zero1", "ddp"]
MOST_PROCESSES = 2**17  # beyond any machine: such a number is a slip


class ParallelConfig(Strict):
    """Over how many processes (one per GPU, or CPU processes) the run is spread, and how they share
    the model. See `lsai_core.parallel`.

    `fsdp * replicate * cp * tp * pp` processes, of which `tp` share each matrix, `pp` the blocks
    and `cp` each sequence, a slice each. Of what these leave to a process, `fsdp * cp` hold one
    copy of weights, gradients and optimizer states, a shard each; the `replicate` groups average
    their gradients (hybrid sharding, HSDP: one group per node).
    """

    kind: Annotated[ParallelKind, STEP, LATER] = Field(
        "fsdp",
        description="fsdp, zero2 (FSDP2, gathers once a step): shards; ddp, zero1: copies, "
        "replicate of them",
    )
    fsdp: int = Field(
        1,
        gt=0,
        le=MOST_PROCESSES,
        description="groups of cp processes that share one copy of the model, each its batch",
    )
    replicate: int = Field(1, gt=0, le=MOST_PROCESSES, description="copies of the model (HSDP)")
    cp: int = Field(
        1,
        gt=0,
        le=MOST_PROCESSES,
        description="processes that share each sequence (context parallelism)",
    )
    tp: Annotated[int, LATER] = Field(
        1,
        gt=0,
        le=MOST_PROCESSES,
        description="processes that share each matrix (tensor and sequence parallelism)",
    )
    async_tp: Annotated[bool, STEP, LATER] = Field(
        False, description="tp, compiled: products in parts, beside their messages (unmeasured)"
    )
    pp: Annotated[int, LATER] = Field(
        1, gt=0, le=MOST_PROCESSES, description="processes that share the blocks (pipeline)"
    )
    pp_schedule: Annotated[Literal["1f1b", "interleaved"], STEP, LATER] = Field(
        "1f1b", description="interleaved: two stages a process"
    )
    cp_method: Annotated[ContextMethod, STEP] = Field(
        "zigzag", description="zigzag serves any number of heads"
    )
    reshard_after_forward: Annotated[bool, STEP] = Field(
        True, description="free a block's weights until its backward"
    )
    cpu_offload: Annotated[bool, STEP] = Field(
        False, description="keep weights, gradients and states in host memory"
    )
    fp8_gather: bool = Field(
        False, description="fp8.recipe fused: gather the weights of its layers in fp8"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_way_stayed(cls, data: Any) -> Any:
        """Records of the day on which weights could also travel by copies name the way that stayed
        (DESIGN.md)."""
        if isinstance(data, dict) and data.get("collectives") == "backend":
            return {key: value for key, value in data.items() if key != "collectives"}
        return data

    @model_validator(mode="after")
    def _needs_shards(self) -> Self:
        copies = self.replicate > 1 and not self.keeps_copies
        if self.shards == 1 and (copies or not self.reshard_after_forward):
            raise ValueError("replicate and reshard_after_forward need fsdp > 1 (or cp > 1)")
        if self.world_size > MOST_PROCESSES:
            raise ValueError(
                f"fsdp x replicate x cp x tp x pp = {self.world_size} processes; at most "
                f"{MOST_PROCESSES}"
            )
        return self

    @property
    def shards(self) -> int:
        """Processes over which FSDP2 spreads one copy of the model."""
        return self.fsdp * self.cp

    @property
    def readers(self) -> int:  # the degree of data parallelism
        """Groups of processes that train on batches of their own."""
        return self.fsdp * self.replicate

    @property
    def members(self) -> int:
        """Processes that train on the same sequences, neighbours in rank."""
        return self.cp * self.tp * self.pp

    @property
    def stages(self) -> int:
        """Into how many parts the pipeline cuts the blocks."""
        return self.pp * (2 if self.pp_schedule == "interleaved" else 1)

    @property
    def world_size(self) -> int:
        """How many processes the run has."""
        return self.readers * self.members

    @property
    def keeps_copies(self) -> bool:
        """Whether every process that reads a batch of its own keeps whole weights."""
        return self.kind in ("ddp", "zero1")

    @property
    def state_parts(self) -> int:
        """Among how many processes the optimizer states of one copy are divided."""
        return self.replicate if self.kind == "zero1" else self.shards * self.tp * self.pp

    @property
    def distributed(self) -> bool:
        """Whether the run's processes form a group: several, and with CPU offload one as well."""
        return self.world_size > 1 or self.cpu_offload

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds the model."""
        spread = self.shards * self.replicate > 1 or self.cpu_offload
        return spread and not self.keeps_copies
