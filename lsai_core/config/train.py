"""What one training run is: a strict, fully resolved description.

Every key is declared here, with its default and its bounds; an unknown key or a wrong type is an
error that names the key. Which settings cannot go together depends on kernels, recipes and methods,
which stand above: `lsai_core.training.combinations` checks that before anything starts. The
resolved config is what the run key hashes (`lsai_core.base.code`), so two runs with equal configs,
code and hardware are the same run.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

# What fields affect; a field without such an annotation affects all.
from lsai_core.config.affects import LATER, NOTHING, RESULT, STEP
from lsai_core.config.model import (
    MOST_LAYERS,
    MOST_TOKENS,
    AttentionConfig,
    BlockCheckpoint,
    GradCheckpoint,
    ModelConfig,
    Tokens,
    in_blocks,
)
from lsai_core.config.parallel import ParallelConfig
from lsai_core.config.strict import Strict

Precision = Literal["fp32", "tf32", "bf16_autocast", "bf16_residual", "bf16"]
Fp8Recipe = Literal[
    "none",
    "fused",
    "tensorwise",
    "torchao_tensorwise",
    "torchao_rowwise",
    "te_delayed",
    "te_current",
    "te_block",
]
LinearName = Literal["qkv", "attention_output", "gate_up", "down", "output"]
TensorClass = Literal["embedding", "norms", "output", "matrices"]
TENSOR_CLASSES: tuple[TensorClass, ...] = ("embedding", "norms", "output", "matrices")
Share = Annotated[float, Field(ge=0, lt=1)]

LARGEST_VOCABULARY = 262_144
LOSSES = ("fused", "full")
# Beyond any machine: such a number is a slip, and is refused where it is given.
MOST_STEPS = 2**40
MOST_SECONDS = 10_000_000.0  # 116 days
Steps = Annotated[int, Field(gt=0, le=MOST_STEPS)]
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]


class DataConfig(Strict):
    """Which text, and how it becomes tokens. See `lsai_lab.data`."""

    source: Annotated[str, RESULT] = Field(
        "stdlib", description="stdlib, polish-docs, debian-docs, speakleash:<name>, file:<glob>"
    )
    column: Annotated[str, RESULT] = Field(
        "text",
        min_length=1,
        description="file: the field or column that holds the text, where records have some",
    )
    vocab_size: int = Field(
        10_000,
        gt=256,
        le=LARGEST_VOCABULARY,
        description="BPE vocabulary, trained on the training split only",
    )
    tokenizer: Annotated[str | None, RESULT] = Field(
        None,
        description="a tokenizer.json (or its folder) instead of a BPE trained here; vocab_size "
        "bounds its ids",
    )
    max_mb: Annotated[float | None, RESULT] = Field(
        None, gt=0, description="at most so many MB, in whole documents"
    )
    tokenizer_mb: Annotated[float, RESULT] = Field(
        64.0, gt=0, description="train the BPE on at most so many MB"
    )
    split_seed: Annotated[int, RESULT] = Field(0, ge=0, lt=2**32)


class Fp8Config(Strict):
    """Which matmuls run in fp8, and how their inputs are scaled. See `lsai_core.fp8`."""

    recipe: Fp8Recipe = "none"
    layers: tuple[LinearName, ...] = Field(  # not strict: YAML has lists
        ("qkv", "attention_output", "gate_up", "down"),
        min_length=1,
        strict=False,
        description="converted linear layers",
    )


class OptimConfig(Strict):
    """The optimizer, with linear warm-up and cosine decay."""

    name: str = Field(
        "adamw", description="a file of lsai_core/optimizers/kinds or techniques/optimizers"
    )
    lr: Annotated[float, RESULT] = Field(3e-4, gt=0)
    min_lr_ratio: Annotated[float, RESULT] = Field(
        0.1, ge=0, le=1, description="final learning rate as a share of lr"
    )
    warmup_steps: Annotated[int, RESULT] = Field(20, ge=0, le=MOST_STEPS)
    betas: Annotated[tuple[Share, Share], RESULT] = Field((0.9, 0.95), strict=False)
    eps: Annotated[float, RESULT] = Field(1e-8, gt=0)
    weight_decay: Annotated[float, RESULT] = Field(0.1, ge=0)
    grad_clip: float = Field(
        1.0, ge=0, description="largest gradient norm; 0 switches clipping off"
    )
    kernel: Annotated[Literal["auto", "torch", "triton"], STEP] = Field(
        "auto",
        description="torch: torch's fused AdamW; triton: clipping and update in one pass; auto: "
        "triton on GPUs",
    )
    states: Literal["full", "8bit"] = Field(
        "full", description="moments in the weights' dtype, or in blocks of 8 bits"
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        "nearest", description="of updated bf16 weights, on GPUs and CPUs"
    )
    rounded: Annotated[tuple[TensorClass, ...], LATER] = Field(
        TENSOR_CLASSES,
        strict=False,
        description="which bf16 weights are all there is; AdamW keeps the others in fp32, too",
    )


class EvalConfig(Strict):
    """Validation on held-out text: every `every` steps (0: at the end only), over `sequences` of
    `seq_len` tokens, spread over the split (0: all of it). Which ones depends on nothing else."""

    every: Annotated[int, RESULT] = Field(0, ge=0, le=MOST_STEPS)
    sequences: Annotated[int, RESULT] = Field(0, ge=0, le=MOST_STEPS)


class ProfileConfig(Strict):
    """What is measured beside loss and time."""

    memory_steps: Annotated[int, NOTHING] = Field(
        5,
        ge=0,
        le=MOST_STEPS,
        description="steps whose forward/backward/optimizer peaks are recorded; 0: none",
    )
    skip_steps: Annotated[int, NOTHING] = Field(
        5,
        ge=0,
        le=MOST_STEPS,
        description="first steps that speed figures leave out (warm-up, compilation)",
    )
    trace: Annotated[bool, NOTHING] = Field(
        False, description="write a torch profiler trace of three steps"
    )
    snapshot: Annotated[bool, NOTHING] = Field(False, description="write a CUDA memory snapshot")
    lost_updates: Annotated[int, NOTHING, LATER] = Field(
        0,
        ge=0,
        le=MOST_STEPS,
        description="every so many steps, count the weights that an update left as they were",
    )


class CheckpointConfig(Strict):
    """Exact-resume checkpoints: every `every` steps (0: none), the newest `keep` are kept until the
    run has ended."""

    every: Annotated[int, NOTHING] = Field(0, ge=0, le=MOST_STEPS)
    keep: Annotated[int, NOTHING] = Field(1, ge=1, le=MOST_STEPS)
    export: Annotated[bool, NOTHING] = Field(
        False, description="write a Hugging Face checkpoint with the tokenizer, <run>/model"
    )


class TrainConfig(Strict):
    """One training run, complete: equal config + equal code + equal machine = the same run.

    `batch_size` counts per process: R processes with batch_size B see what one process with R * B
    sees. The `parallel.cp` processes that share their sequences count as one.
    """

    model: ModelConfig
    attention: AttentionConfig = AttentionConfig()
    precision: Precision = "fp32"
    fp8: Fp8Config = Fp8Config()
    loss: str = Field(
        "fused",
        description="full keeps all logits, fused: chunks; or a file of techniques/losses",
    )
    loss_chunk: Annotated[Tokens | None, STEP, LATER] = Field(
        None,
        description="tokens of a chunk of the fused loss; null: 2 GiB of logits",
    )
    blocks: Annotated[Literal["fused", "plain"], STEP] = Field(
        "fused",
        description="fused: SwiGLU and RMSNorm with the project's gradient kernels; plain: torch's "
        "operations",
    )
    grad_checkpoint: Annotated[GradCheckpoint, STEP] = Field(
        "none",
        description="full: keep the input of each block; attention: and the output of the "
        "attention kernel; selective: and those "
        "of all matmuls; alternating: but in every second block not those of its "
        "feed-forward layer",
    )
    checkpoint_blocks: Annotated[int | None, STEP, LATER] = Field(
        None,
        ge=1,
        le=MOST_LAYERS,
        description="so many of the first blocks do what grad_checkpoint says; null: all",
    )
    checkpoint_others: Annotated[GradCheckpoint, STEP, LATER] = Field(
        "none", description="what the other blocks do, if checkpoint_blocks leaves any"
    )
    saved_inputs: Annotated[Literal["gpu", "host"], STEP] = Field(
        "gpu",
        description="where the inputs of checkpointed blocks wait; host: in pinned host memory",
    )
    inputs_on_gpu: Annotated[int, STEP] = Field(
        0,
        ge=0,
        le=MOST_LAYERS,
        description="saved_inputs host: so many of the last blocks keep theirs on the GPU",
    )
    mlp_chunk: Annotated[Tokens | None, STEP] = Field(
        None, description="tokens that an MLP takes at a time"
    )
    init_from: Annotated[str | None, RESULT] = Field(
        None,
        description="Hugging Face Llama checkpoint to start from: a folder, or a name below the "
        "data root's models/",
    )
    compile: Annotated[bool, STEP] = False
    device: Annotated[Literal["auto", "cpu", "cuda"], STEP] = "auto"
    data: DataConfig = DataConfig()
    seq_len: int = Field(512, gt=1, le=MOST_TOKENS)
    batch_size: int = Field(
        8, gt=0, le=MOST_TOKENS, description="sequences per micro-batch and process"
    )
    grad_accum: int = Field(1, gt=0, le=MOST_STEPS, description="micro-batches per optimizer step")
    steps: Annotated[int, RESULT] = Field(100, gt=0, le=MOST_STEPS)
    seed: Annotated[int, RESULT] = Field(0, ge=0, lt=2**32)
    log_every: Annotated[Steps, NOTHING] = 10
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    profile: ProfileConfig = ProfileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()

    @model_validator(mode="before")
    @classmethod
    def _batches_are_sequences(cls, data: Any) -> Any:
        """Older records count what is judged in batches per process: as sequences.

        Whoever gives both gets an error that names `eval.batches`, which is no key any more.
        """
        judged = data.get("eval") if isinstance(data, dict) else None
        if not isinstance(judged, dict) or "batches" not in judged or "sequences" in judged:
            return data
        parallel = data.get("parallel") or {}
        sizes = [judged["batches"], data.get("batch_size", cls.model_fields["batch_size"].default)]
        if isinstance(parallel, dict):
            sizes += [parallel.get("fsdp", 1), parallel.get("replicate", 1)]
        if not all(type(size) is int for size in sizes):
            return data  # something is wrong with these, and is told of them
        kept = {key: value for key, value in judged.items() if key != "batches"}
        return {**data, "eval": {**kept, "sequences": math.prod(sizes)}}

    @property
    def checkpointed(self) -> list[BlockCheckpoint]:
        """What each block does."""
        layers, first = self.model.n_layers, self.checkpoint_blocks
        modes = in_blocks(self.grad_checkpoint, layers)
        if first is not None:
            modes[first:] = in_blocks(self.checkpoint_others, layers)[first:]
        return modes

    def in_every_block(self, mode: GradCheckpoint) -> TrainConfig:
        """The same with `mode` in all blocks."""
        alike = {"checkpoint_blocks": None, "checkpoint_others": "none"}
        return self.model_copy(update={"grad_checkpoint": mode, **alike})

    @property
    def computed_again(self) -> int:
        """How many blocks are computed a second time whole, with their attention."""
        return self.checkpointed.count("full")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step trains on, over all processes (no padding exists, so all
        of them count)."""
        return self.batch_size * self.grad_accum * self.seq_len * self.parallel.readers
