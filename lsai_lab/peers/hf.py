"""The Hugging Face Trainer: how it is started, the arguments it gets, and what its process does.

The arguments follow its documentation on training speed
(https://huggingface.co/docs/transformers/perf_train_gpu_one and the pages on torch.compile, Liger
and FSDP). fp8 is Accelerate's, with torchao.

The process trains a `LlamaForCausalLM` of our shape with our initial weights, made on the device in
their dtype, with the Trainer's own loop. It reads the windows of our training in their order, with
the target of every position (`shift_labels`): by itself the model would have none for the last. A
callback marks the ends of steps. A subclass keeps each step's loss, and sets the learning rate of
each step: the Trainer's own schedule of this shape begins with a step of rate 0.

What differs from ours and has no option: the model turns q and k by angles whose cosines are
rounded to bf16, and gradients of bf16 are scaled to the largest norm in bf16.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from lsai_core.config.train import OptimConfig
from lsai_core.model.hf import config_json
from lsai_core.training.host_memory import keep_freed_memory
from lsai_core.training.step import learning_rate, resolve_device
from lsai_lab.data import Dataset
from lsai_lab.launch.launch import torchrun
from lsai_lab.peers.config import WORKER, PeerConfig
from lsai_lab.peers.start import start_as_ours
from lsai_lab.peers.watch import Job, Watch


def start(config: PeerConfig, dataset: Dataset, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Command line and variables that start it. One process runs without torchrun: with it the
    Trainer would wrap the model for several.

    Accelerate prepares fp8 weights for FSDP's gathers unless told otherwise. That makes new
    parameters, which the Trainer's optimizer does not hold (accelerate 1.15, with and without
    FSDP2): the linear layers would not be trained.
    """
    launcher = (
        [sys.executable]
        if config.parallel.world_size == 1
        else torchrun(config.parallel.world_size)
    )
    fp8 = {
        "ACCELERATE_MIXED_PRECISION": "fp8",
        "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "false",
    }
    return [*launcher, "-m", WORKER], {} if config.fp8 == "none" else fp8


def of_optimizer(optim: OptimConfig) -> dict[str, Any]:
    """The arguments of `TrainingArguments` that say what AdamW does."""
    return {
        "learning_rate": optim.lr,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_epsilon": optim.eps,
        "max_grad_norm": optim.grad_clip,
    }


def of_schedule(optim: OptimConfig) -> dict[str, Any]:
    """The arguments of `TrainingArguments` for the schedule that is the most like ours."""
    return {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": optim.min_lr_ratio},
        "warmup_steps": optim.warmup_steps,
    }


def training_arguments(config: PeerConfig, output: Path, on_gpu: bool) -> dict[str, Any]:
    """Keyword arguments of `TrainingArguments`."""
    arguments: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": config.steps,
        "per_device_train_batch_size": config.batch_size,
        "optim": "adamw_torch_fused",
        **of_optimizer(config.optim),
        # Asking for both would be answered with bf16 alone; Accelerate's fp8 runs the rest under
        # bf16 autocast.
        "bf16": config.precision == "bf16_autocast" and config.fp8 == "none",
        "torch_compile": config.compile,
        "use_liger_kernel": config.liger,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": on_gpu,
        "accelerator_config": {"non_blocking": on_gpu},
        "use_cpu": not on_gpu,
        "seed": config.seed,
    }
    checkpointing = config.grad_checkpoint == "full"
    if config.parallel.world_size > 1:
        fsdp: dict[str, Any] = {"version": 2, "activation_checkpointing": checkpointing}
        fsdp |= {"reshard_after_forward": config.parallel.reshard_after_forward}
        fsdp |= {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        return arguments | {"fsdp": True, "fsdp_config": fsdp}
    return arguments | ({"gradient_checkpointing": True} if checkpointing else {})


def tuning(config: PeerConfig, on_gpu: bool) -> str:
    """The arguments in one line, as a person would write them."""
    arguments = training_arguments(config, Path("out"), on_gpu)
    return (
        "TrainingArguments("
        + ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        + "), with the learning rate of each step and the order of the text from this package"
    )


def watched(watch: Watch) -> Any:
    """A kind of the Trainer that tells the watch each step's loss, with our learning rates and the
    order of the text as it comes."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer

    config = watch.job.config

    class WatchedTrainer(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            watch.loss(loss)
            return loss

        def create_scheduler(
            self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
        ) -> Any:
            def factor(step: int) -> float:
                return learning_rate(step, config.steps, config.optim) / config.optim.lr

            of: Any = optimizer or self.optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(of, factor)
            return self.lr_scheduler

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            rows: Any = train_dataset or self.train_dataset
            return SequentialSampler(rows)

    return WatchedTrainer


def steps(watch: Watch) -> Any:
    """The callback that tells the watch where steps end. It raises RuntimeError if parameters are
    not trained."""
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            model, groups = kwargs["model"], kwargs["optimizer"].param_groups
            optimized = {id(parameter) for group in groups for parameter in group["params"]}
            if lost := sum(p.numel() for p in model.parameters() if id(p) not in optimized):
                raise RuntimeError(
                    f"the Trainer's optimizer does not hold {lost:,} of the model's parameters"
                )
            watch.check(model)
            watch.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.step()

    return Steps()


def train(job: Job) -> None:
    """Build the model and the Trainer in this process, train, and write the results."""
    from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

    config = job.config
    device = resolve_device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    else:
        keep_freed_memory()  # as our own trainer does on a CPU
    watch = Watch(job, device)
    arguments = TrainingArguments(
        **training_arguments(config, job.folder / "out", device.type == "cuda")
    )
    torch.manual_seed(config.seed)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    shape = LlamaConfig(**config_json(config.model, dtype, config.seq_len), use_cache=False)
    with device:
        model = AutoModelForCausalLM.from_config(
            shape, dtype=dtype, attn_implementation=config.attention
        )
    start_as_ours(model, config.model, config.seed, device)
    rows: Any = [{"input_ids": x, "labels": y, "shift_labels": y} for x, y in job.windows()]
    trainer = watched(watch)(
        model=model, args=arguments, train_dataset=rows, callbacks=[steps(watch)]
    )
    trainer.train()
    watch.finish(attention_kernel=str(model.config._attn_implementation))
