"""A sharded model as one Hugging Face checkpoint: the slices are gathered, tensor by tensor, into rank 0's host memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lsai_core.hf import save_hf
from lsai_core.model import Transformer
from lsai_core.parallel.world import World


def export_hf(model: Transformer, folder: Path, world: World, *, max_seq_len: int = 2048) -> None:
    """Write `model`, sharded or not, to `folder` (see `lsai_core.hf.save_hf`); every process must call.

    Rank 0 needs host memory for the whole model.
    """
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if world.is_main:
        with torch.device("meta"):
            plain = Transformer(model.config, model.attention_config)
        # Without what only training needs (the scales of fp8).
        plain.load_state_dict({name: whole[name] for name in plain.state_dict()}, assign=True)
        save_hf(plain, folder, max_seq_len=max_seq_len)
    world.barrier()
