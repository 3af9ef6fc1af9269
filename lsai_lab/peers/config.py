"""What one run of another trainer is: the shape of the work is the training config's, so that both
do the same."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from lsai_core.config.affects import affects
from lsai_core.config.model import MOST_TOKENS, ModelConfig, Tokens
from lsai_core.config.parallel import ParallelConfig
from lsai_core.config.strict import Strict, deep_merge
from lsai_core.config.train import MOST_STEPS, DataConfig, OptimConfig, Steps
from lsai_core.optimizers.base import own_update
from lsai_lab.machine.environment import package_version

# What a peer's process executes.
WORKER = "lsai_lab.peers.worker"
GRAPH_WARMUP = 3  # steps before megatron's CUDA graph is captured


class PeerConfig(Strict):
    """`precision: bf16`: weights, gradients and AdamW states in bf16; `bf16_autocast`: these in
    fp32, matrix products in bf16; `fp32`: both, to show that all do the same. Over several
    processes gradients are summed in fp32, as ours are.

    `batch_size` counts per process, as in `TrainConfig`.
    """

    framework: Literal["hf", "torchtitan", "megatron"]
    model: ModelConfig
    precision: Literal["fp32", "bf16", "bf16_autocast"] = "bf16"
    fp8: Literal["none", "tensorwise", "rowwise", "delayed"] = Field(
        "none", description="not the output layer; by torchao, megatron: by Transformer Engine"
    )
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    liger: bool = Field(
        False, description="hf: use_liger_kernel, fused kernels for loss, norms, rotary and SwiGLU"
    )
    cuda_graph: bool = Field(
        False, description="megatron: one CUDA graph of the forward and the backward pass"
    )
    compile: bool = False
    grad_checkpoint: Literal["none", "selective", "full"] = "none"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    data: DataConfig = DataConfig()
    seq_len: int = Field(512, gt=1, le=MOST_TOKENS)
    batch_size: Tokens = 8
    steps: Steps = 60
    skip_steps: int = Field(
        5,
        ge=1,
        le=MOST_STEPS,
        description="first steps that speed figures leave out (warm-up, compilation)",
    )
    seed: int = Field(0, ge=0, lt=2**32)
    optim: OptimConfig = OptimConfig()
    parallel: ParallelConfig = ParallelConfig()
    packages: dict[str, str | None] = Field(
        {}, description="versions when it was planned: another is another run"
    )

    @classmethod
    def from_study(cls, config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        """The shape of the work from the training config, what is special from its key `peer`."""
        shared = {
            key: value
            for key, value in config.items()
            if key in {*cls.model_fields} - {"attention", "fp8"}
        }
        if "skip_steps" in config.get("profile", {}):
            shared["skip_steps"] = config["profile"]["skip_steps"]
        if "recipe" in config.get("fp8", {}):
            shared["fp8"] = config["fp8"]["recipe"]
        if config.get("peer", {}).get("framework") == "megatron":
            shared["compile"] = False  # it has kernels where others are compiled
        # Which of our kernels updates the weights is nothing to a peer.
        kernel = {
            key for key in OptimConfig.model_fields if not affects(OptimConfig, key, "result")
        }
        shared["optim"] = {
            key: value for key, value in config.get("optim", {}).items() if key not in kernel
        }
        merged = deep_merge(deep_merge(shared, config.get("peer", {})), settings)
        return {
            **merged,
            "packages": {name: package_version(name) for name in needed_packages(merged)},
        }

    @model_validator(mode="after")
    def _combination_possible(self) -> Self:
        if self.skip_steps >= self.steps:
            raise ValueError(
                f"skip_steps={self.skip_steps} leaves none of steps={self.steps} to be timed"
            )
        parallel, optim = self.parallel, self.optim
        if parallel.cpu_offload or parallel.fp8_gather:
            raise ValueError(
                "parallel.cpu_offload, fp8_gather are no peer's; torchtitan gathers in fp8 anyway"
            )
        if parallel.kind != "fsdp" or parallel.cp * parallel.pp > 1:
            raise ValueError("a peer has parallel.kind: fsdp, no cp and no pp")
        if optim.name != "adamw" or own_update(optim):
            raise ValueError(
                "a peer trains with AdamW, whole states and rounding: nearest, all weights rounded"
            )
        if self.cuda_graph and self.framework != "megatron":
            raise ValueError("cuda_graph is Megatron-Core's alone")
        if reason := _LACKS[self.framework](self):
            raise ValueError(reason)
        return self

    @property
    def needs_gpu(self) -> bool:
        fused = self.liger or self.attention != "sdpa" or self.fp8 != "none"
        return self.framework != "hf" or fused or self.device == "cuda"

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step trains on, over all processes."""
        return self.batch_size * self.seq_len * self.parallel.readers


def _hf_lacks(config: PeerConfig) -> str | None:
    parallel = config.parallel
    others = config.grad_checkpoint == "selective" or config.fp8 in ("rowwise", "delayed")
    if others or parallel.replicate > 1 or parallel.tp > 1:
        return (
            "the HF Trainer has no grad_checkpoint: selective, parallel.replicate or tp, fp8: "
            "rowwise or delayed"
        )
    if config.precision == "bf16" and parallel.world_size > 1:
        return (
            "over several processes the HF Trainer's weights are fp32 shards; use precision: "
            "bf16_autocast"
        )
    return None


def _titan_lacks(config: PeerConfig) -> str | None:
    parallel = config.parallel
    if config.liger or config.attention != "sdpa":
        return "torchtitan has attention: sdpa and no liger"
    if config.fp8 == "delayed":
        return "torchtitan's fp8 has current scales: tensorwise or rowwise"
    if config.model.tie_embeddings:
        return "torchtitan's Llama does not tie its embeddings; use tie_embeddings: false"
    if parallel.tp > 1 and parallel.shards == 1 and config.precision == "bf16_autocast":
        return (
            "torchtitan has autocast with one process or FSDP, and with parallel.tp alone it would "
            "compute in fp32; use precision: bf16"
        )
    return None


def _megatron_lacks(config: PeerConfig) -> str | None:
    parallel = config.parallel
    if config.compile or config.liger or config.attention != "sdpa":
        return "megatron has kernels of its own: no compile, no liger, attention: sdpa"
    if config.fp8 == "rowwise":
        return "megatron's fp8 is tensorwise (current scales) or delayed"
    if parallel.replicate > 1:
        return "megatron shares states among parallel.fsdp processes, and matrices among tp"
    if config.model.rope_scaling is not None:
        return "megatron scales rotary embeddings by a factor alone; use rope_scaling: null"
    if config.precision == "fp32" or (config.precision == "bf16" and parallel.world_size > 1):
        return "megatron has precision: bf16 with one process, and fp32 masters with bf16_autocast"
    if config.cuda_graph and config.steps <= GRAPH_WARMUP:
        return f"megatron's CUDA graph comes after {GRAPH_WARMUP} steps; use more steps"
    return None


# What a framework cannot do, in one line, or None.
_LACKS = {"hf": _hf_lacks, "torchtitan": _titan_lacks, "megatron": _megatron_lacks}


def needed_packages(config: dict[str, Any]) -> list[str]:
    """Distributions that a run needs beside torch; `config` are the keys of a `PeerConfig`."""
    if config.get("framework") == "megatron":
        return ["megatron-core", "transformer-engine"]
    names = (
        ["torchtitan"]
        if config.get("framework") == "torchtitan"
        else ["transformers", "accelerate"]
    )
    names += ["liger-kernel"] if config.get("liger") else []
    names += ["flash-attn"] if config.get("attention") == "flash_attention_2" else []
    names += ["torchao"] if config.get("fp8", "none") != "none" else []
    return names
