"""How other trainers are set: what all of them do."""

from typing import Any, Literal

Peer = Literal["torchtitan", "torchtune", "hf", "nanotron"]
# Of published figures alone: neither compiled blocks nor FSDP are its ways.
PublishedBy = Literal[Peer, "megatron"]
# What all of them do: logits as a whole, torch's operations and optimizer. Of the text nothing
# matters.
PLAIN: dict[str, Any] = {
    "loss": "full",
    "blocks": "plain",
    "optim": {"kernel": "torch"},
    "data": {"vocab_size": 257},
}
