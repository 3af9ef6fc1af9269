"""Twenty training steps of `anybody.py` and `anybody_more.py`, with the whole model compiled.

    python tests/anybody_compiled.py              predict all; needs no GPU
    python tests/anybody_compiled.py --measure    measure all on a GPU, and show the errors

`model.compile()` in its default mode follows each model's construction; all else is as it was.
Predictions lie in `reports/predictions/anybody_compiled.json` before anything is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import anybody
import anybody_more
from anybody import Step

NAMES = (
    *("llama_bf16_adamw", "llama_autocast_accumulated", "llama_fp16_scaler", "qwen3_recomputed"),
    *("gpt2_fp32_no_dropout", "gpt2_autocast_dropout", "neox_bf16_adafactor", "gemma2_bf16"),
    *("phi3_frozen_but_last", "olmo2_fp32", "bert_autocast", "t5_bf16", "vit_autocast"),
    *("torch_encoder_autocast_norm_first", "resnet50_fp32_sgd", "unet_autocast", "convnext_fp32"),
    *("qwen2_bf16_fused", "falcon_bf16", "starcoder2_bf16"),
)


def compiled(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`, whose module compiles itself when it is first called."""

    @functools.wraps(make)
    def module(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        made.compile()
        return made

    return module


def whole(name: str) -> Callable[[str], Step]:
    """The configuration `name` with its model compiled."""

    def make(device: str) -> Step:
        for module in (anybody, anybody_more):
            for function in ("from_config", "built"):
                if hasattr(module, function):
                    setattr(module, function, compiled(getattr(module, function)))
        return anybody.CONFIGURATIONS[name](device)

    return make


TABLE = anybody.TABLE.with_name("anybody_compiled.json")
COMPILED = {f"{name}_compiled": whole(name) for name in NAMES}
anybody.CONFIGURATIONS |= COMPILED  # also in the processes that measure

if __name__ == "__main__":
    anybody.main(list(COMPILED), TABLE)
