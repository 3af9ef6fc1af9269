"""torchtitan 0.2: its command line and what its process does; and what the adapter to 0.3
(`titan3.py`) shares with it.

The options are those of its documentation (README, docs/fsdp.md, docs/float8.md), and so is
torchrun, also for one GPU. The process is `python -m torchtitan.train` with these additions: the
model's shape, as one more flavor of torchtitan's Llama 3, a dataloader of the windows of our token
file, our initial weights, no weight decay of the norms, as here, and a subclass of its Trainer that
tells the watch where a step ends.

What differs from ours and has no option: the norm of bf16 gradients is computed, and they are
scaled by it, in bf16; one process runs under autocast also where the weights are bf16.
"""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lsai_core.config.model import ModelConfig
from lsai_core.config.train import OptimConfig
from lsai_core.optimizers.base import decayed
from lsai_lab.data import Dataset
from lsai_lab.launch.launch import torchrun
from lsai_lab.peers.config import WORKER, PeerConfig
from lsai_lab.peers.start import Renamed, start_as_ours
from lsai_lab.peers.watch import Job, Watch

FLAVOR = "lsai"
Options = Callable[[PeerConfig, Path], list[str]]


def command(
    options: Options, config: PeerConfig, dataset: Dataset, folder: Path
) -> tuple[list[str], dict[str, str]]:
    """Command line and variables that start it (those of its run_train.sh), with the tokenizer that
    it wants to find on disk."""
    dataset.tokenizer()  # a UserError for tokens that came without one
    (folder / "tokenizer").mkdir(parents=True)
    shutil.copyfile(dataset.folder / "tokenizer.json", folder / "tokenizer" / "tokenizer.json")
    words = [*torchrun(config.parallel.world_size), "-m", WORKER, *options(config, folder)]
    return words, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def shared(config: PeerConfig) -> dict[str, object]:
    """The options that both series have. Their checkpoints, TensorBoard and profiling are off
    unless asked for.

    Metrics are logged, which waits for the GPU, in the first and the last step only.
    """
    optim, parallel = config.optim, config.parallel
    values: dict[str, object] = {
        "training.seq_len": config.seq_len,
        "training.local_batch_size": config.batch_size,
        "training.steps": config.steps,
        "training.max_norm": optim.grad_clip or "inf",  # 0 would scale all gradients to nothing
        "training.dtype": "bfloat16" if config.precision == "bf16" else "float32",
        "training.mixed_precision_param": "float32" if config.precision == "fp32" else "bfloat16",
        "lr_scheduler.warmup_steps": optim.warmup_steps,
        # The cosine ends one step behind the last that is counted here; ours ends at the last.
        "lr_scheduler.total_steps": max(config.steps - 1, optim.warmup_steps),
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.min_lr_factor": optim.min_lr_ratio,
        "parallelism.data_parallel_shard_degree": parallel.fsdp,
        "parallelism.data_parallel_replicate_degree": parallel.replicate,
        "parallelism.tensor_parallel_degree": parallel.tp,
        "parallelism.fsdp_reshard_after_forward": "default"
        if parallel.reshard_after_forward
        else "never",
        "metrics.log_freq": config.steps,
        "metrics.disable_color_printing": True,
        "debug.seed": config.seed,
    }
    return values | (
        {"compile.enable": True, "compile.components": "model,loss"} if config.compile else {}
    )


def as_words(values: dict[str, object]) -> list[str]:
    """The options as a command line has them; True is a flag."""
    return [
        word for key, value in values.items() for word in (f"--{key}", str(value)) if word != "True"
    ]


def options(config: PeerConfig, folder: Path) -> list[str]:
    """All options of a run for the command line of torchtitan 0.2."""
    optim = config.optim
    values = shared(config) | {
        "job.dump_folder": folder / "out",
        "model.name": "llama3",
        "model.flavor": FLAVOR,
        "model.hf_assets_path": folder / "tokenizer",
        "optimizer.name": "AdamW",
        "optimizer.lr": optim.lr,
        "optimizer.beta1": optim.betas[0],
        "optimizer.beta2": optim.betas[1],
        "optimizer.eps": optim.eps,
        "optimizer.weight_decay": optim.weight_decay,
        "optimizer.implementation": "fused",
        "activation_checkpoint.mode": config.grad_checkpoint,
        "activation_checkpoint.selective_ac_option": "op",
    }
    if config.fp8 != "none":
        fp8 = "quantize.linear.float8"
        values |= {"model.converters": fp8, f"{fp8}.filter_fqns": "output"}
        gather = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
        values |= {f"{fp8}.{name}": True for name in gather if config.parallel.world_size > 1}
    return as_words(values)


start = partial(command, options)


def flavor(model: ModelConfig) -> Any:
    """torchtitan's description of a Llama of this shape.

    It computes the MLP's width as a multiple of `multiple_of` that is at least `ffn_dim_multiplier`
    * 8/3 d_model; with the width itself as the only multiple within reach, the width comes out.
    """
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.models.llama3.model.args import RoPEScalingArgs

    return TransformerModelArgs(
        dim=model.d_model,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        vocab_size=model.vocab_size,
        multiple_of=model.d_ff,
        ffn_dim_multiplier=0.5 * model.d_ff / int(8 * model.d_model / 3),
        norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        rope_scaling_args=RoPEScalingArgs(**rope_scaling(model)),
    )


def rope_scaling(model: ModelConfig) -> dict[str, float]:
    """The scaling of the rotary embeddings in torchtitan's words; factor 1 scales nothing."""
    given = {"factor": 1.0} if model.rope_scaling is None else model.rope_scaling.model_dump()
    return {"scaling_factor" if name == "factor" else name: value for name, value in given.items()}


def watched(trainer: Any, job: Job, renamed: Renamed) -> Any:
    """torchtitan's Trainer, which starts with our weights and tells the watch about its steps.
    `renamed`: torchtitan's own way from Hugging Face's tensors to its names and order of rows."""

    class WatchedTrainer(trainer):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            # The device that torchtitan has set up: what it counts as a share is each process's
            # part of the mean loss.
            self.watch = Watch(job, self.device, loss_is_share=True)
            (model,), config = self.model_parts, job.config
            self.watch.check(model)
            start_as_ours(model, config.model, config.seed, self.device, renamed)

        def forward_backward_step(self, **batch: Any) -> torch.Tensor:
            loss = super().forward_backward_step(**batch)
            self.watch.loss(loss)
            return loss

        def train_step(self, data_iterator: Any) -> None:
            if self.step == 1:
                self.watch.begin()
            super().train_step(data_iterator)
            self.watch.step()

        def train(self) -> None:
            super().train()
            kernel = getattr(getattr(self, "model_args", None), "attn_type", "sdpa")
            self.watch.finish(
                attention_kernel=f"{kernel} (cuDNN first)" if kernel == "sdpa" else kernel
            )

    (job.folder / "out").mkdir(exist_ok=True)
    return WatchedTrainer


def loader(
    job: Job, _config: Any = None, *, dp_rank: int, dp_world_size: int, **_given: Any
) -> Any:
    """torchtitan's dataloader over this process's windows."""
    from torchtitan.components.dataloader import ParallelAwareDataloader

    rows: Any = [({"input": x}, y) for x, y in job.windows()[dp_rank::dp_world_size]]
    return ParallelAwareDataloader(rows, dp_rank, dp_world_size, batch_size=job.config.batch_size)


def optimizers(model_parts: list[torch.nn.Module], given: Any, *_: Any) -> Any:
    """torchtitan's own, but for the weight decay of vectors, which it has no option against."""
    from torchtitan.components.optimizer import OptimizersContainer

    def adamw(parameters: list[torch.nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
        named = {str(number): parameter for number, parameter in enumerate(parameters)}
        groups = decayed(named, OptimConfig(weight_decay=given.weight_decay))
        return torch.optim.AdamW(groups, **settings)

    settings = {"lr": given.lr, "betas": (given.beta1, given.beta2), "eps": given.eps}
    return OptimizersContainer(model_parts, adamw, settings | {"fused": True, "foreach": False})


def train(job: Job) -> None:
    """Run torchtitan's own main in this process, with the additions of this file."""
    from torchtitan.models import llama3
    from torchtitan.train import Trainer, main

    llama3.llama3_args[FLAVOR] = shape = flavor(job.config.model)
    llama3.build_text_dataloader = partial(loader, job)
    llama3.build_optimizers = optimizers
    main(watched(Trainer, job, llama3.Llama3StateDictAdapter(shape, None).from_hf))
