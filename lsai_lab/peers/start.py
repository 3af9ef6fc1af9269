"""The weights that a peer begins with: those of our own run of the same model and seed.

They are drawn one tensor at a time on the peer's device, as our own trainer draws them, and rounded
once to the dtype of the peer's parameter, as ours are. The model never exists twice, so that 8
billion parameters take seconds and the room of the largest tensor in float32.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from lsai_core.config.model import ModelConfig
from lsai_core.model.hf import slots
from lsai_core.model.transformer import fill, initial_values, shaped

# What wrappers put into the names of parameters: torch.compile and checkpointing.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
Renamed = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def initial_weights(
    config: ModelConfig, seed: int, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """The tensors of a Hugging Face Llama of this shape by their names there, float32 on `device`,
    with the values that our run of this seed begins with; together those that share one of our
    parameters."""
    places = slots(config).items()
    for ours, parameter in shaped(config).named_parameters():
        values = initial_values(config, ours, parameter.shape, seed, device)
        yield {
            theirs: values[slot.start : slot.stop] for theirs, slot in places if slot.name == ours
        }


def start_as_ours(
    model: nn.Module, config: ModelConfig, seed: int, device: torch.device, renamed: Renamed = dict
) -> None:
    """Give a peer's `model`, sharded or not, our initial weights, drawn on `device`; every process
    calls. `renamed`: tensors under the names and in the layout of the peer, from those of Hugging
    Face. Raises RuntimeError where the names of both are not the same."""
    parameters = {}
    for name, parameter in model.named_parameters():
        for word in WRAPPERS:
            name = name.replace(word, "")
        parameters[name] = parameter
    missing = set(parameters)
    for tensors in initial_weights(config, seed, device):
        for name, values in renamed(tensors).items():
            if name not in missing:
                raise RuntimeError(f"the peer's model has no parameter {name} left")
            fill(parameters[name], values)
            missing.remove(name)
    if missing:
        raise RuntimeError(f"nothing of ours is for the peer's parameters {sorted(missing)[:3]}")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what is measured of the peer's memory is its own
