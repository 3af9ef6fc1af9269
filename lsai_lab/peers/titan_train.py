"""What torchtitan's process does: `LSAI_PEER=<folder> torchrun ... -m lsai_lab.peers.worker <torchtitan's options>`.

It is `python -m torchtitan.train` with two additions: the model's shape, as one more flavor of torchtitan's Llama 3, and a subclass
of its Trainer that tells the watch where a step ends. Options, loop and log are torchtitan's own.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.train import Trainer, main

from lsai_core.config import ModelConfig
from lsai_lab.peers.titan import FLAVOR
from lsai_lab.peers.watch import Job, Watch


def flavor(model: ModelConfig) -> Any:
    """torchtitan's description of a Llama of this shape.

    It computes the MLP's width as a multiple of `multiple_of` that is at least `ffn_dim_multiplier` * 8/3 d_model; with the
    width itself as the only multiple within reach, the width comes out. Its rotary embeddings are always scaled: factor 1 scales
    nothing.
    """
    scaling = RoPEScalingArgs(scaling_factor=1.0)
    if model.rope_scaling is not None:
        given = model.rope_scaling
        scaling = RoPEScalingArgs(
            given.factor, given.low_freq_factor, given.high_freq_factor, given.original_max_position_embeddings
        )
    return TransformerModelArgs(
        dim=model.d_model, n_layers=model.n_layers, n_heads=model.n_heads, n_kv_heads=model.n_kv_heads,
        vocab_size=model.vocab_size, multiple_of=model.d_ff,
        ffn_dim_multiplier=0.5 * model.d_ff / int(8 * model.d_model / 3), norm_eps=model.norm_eps,
        rope_theta=model.rope_theta, rope_scaling_args=scaling,
    )  # fmt: skip


def watched_trainer(job: Job) -> type[Trainer]:
    """torchtitan's Trainer, watched."""

    class WatchedTrainer(Trainer):
        def __init__(self, job_config: Any) -> None:
            super().__init__(job_config)
            # The device that torchtitan has set up: what it counts as a share is each process's part of the mean loss.
            self.watch = Watch(job, self.device, loss_is_share=True)
            self.watch.check(sum(p.numel() for part in self.model_parts for p in part.parameters()))
            self.watch.check_fp8(*self.model_parts)

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
            kernel = getattr(self.model_args, "attn_type", "sdpa")
            self.watch.finish(attention_kernel=f"{kernel} (cuDNN first)" if kernel == "sdpa" else kernel)

    return WatchedTrainer


def train(job: Job) -> None:
    """torchtitan's own main, with the additions."""
    llama3_args[FLAVOR] = flavor(job.config.model)
    os.makedirs(job.folder / "out", exist_ok=True)
    main(watched_trainer(job))
