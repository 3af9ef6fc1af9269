"""What the Hugging Face Trainer's process does: `LSAI_PEER=<folder> python -m lsai_lab.peers.worker`.

A `LlamaForCausalLM` of the same shape, random weights made on the device in their dtype, the Trainer's own loop over windows of
the same token file. A callback marks the ends of steps and a subclass keeps each step's loss; neither changes what the
Trainer does. The model shifts the labels itself, so that the last position of a sequence has no target; it is computed all the same.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import Dataset as TorchDataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments

from lsai_core.training.host_memory import keep_freed_memory
from lsai_core.training.step import resolve_device
from lsai_lab.data import BatchStream, Dataset
from lsai_lab.peers.hf import model_arguments, training_arguments
from lsai_lab.peers.watch import Job, Watch


class Windows(TorchDataset[dict[str, torch.Tensor]]):
    """Windows of the training split, as many as the run trains on: input_ids and labels, int64 (S,), the same tensor."""

    def __init__(self, job: Job) -> None:
        config = job.config
        self.stream = BatchStream(Dataset(job.dataset).tokens("train"), 1, config.seq_len, config.seed)
        self.count = config.steps * config.batch_size * config.world_size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens_S = self.stream.batch(number)[0][0]
        return {"input_ids": tokens_S, "labels": tokens_S}


class WatchedTrainer(Trainer):
    """The Trainer, with each step's loss kept."""

    watch: Watch

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.watch.loss(loss)
        return loss


class Steps(TrainerCallback):
    """Tells the watch where steps begin and end; refuses to time a training that leaves weights out."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if lost := sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in held):
            raise RuntimeError(f"the Trainer's optimizer does not hold {lost:,} of the model's parameters")
        self.watch.check_fp8(model)
        self.watch.begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.watch.step()


def train(job: Job) -> None:
    """Build, train, write the results."""
    config = job.config
    device = resolve_device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    else:
        keep_freed_memory()  # as our own trainer does on a CPU
    watch = Watch(job, device)
    arguments = TrainingArguments(**training_arguments(config, job.folder / "out", device.type == "cuda"))
    torch.manual_seed(config.seed)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    shape = LlamaConfig(**model_arguments(config))
    with device:
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation=config.attention)
    watch.check(sum(parameter.numel() for parameter in model.parameters()))
    trainer = WatchedTrainer(model=model, args=arguments, train_dataset=Windows(job), callbacks=[Steps(watch)])
    trainer.watch = watch
    trainer.train()
    watch.finish(attention_kernel=str(model.config._attn_implementation))
