"""Twenty training steps of `anybody.py` and `anybody_more.py`, and eight others, with the whole
model compiled.

    python tests/anybody_compiled.py              predict all; needs no GPU
    python tests/anybody_compiled.py --measure    measure all on a GPU, and show the errors
    python tests/anybody_compiled.py --measure --only drawn --beside 4    of the eight

`model.compile()` in its default mode follows each model's construction; all else is as it was.
Predictions lie in `reports/predictions/anybody_compiled.json` before anything is measured.
`anybody_compiled.in_sample.json` is what the code says that has seen the measurement. The eight
were drawn after the twenty were measured: what was refused then, and attention of either kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import anybody
import anybody_more
import torch
import torch.nn.functional as F
from anybody import Step, step_of
from torch import Tensor, nn

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
        return (DRAWN | anybody.CONFIGURATIONS)[name](device)

    return make


def drawn(function: Callable[[str], Step]) -> Callable[[str], Step]:
    DRAWN[function.__name__] = function
    return function


DRAWN: dict[str, Callable[[str], Step]] = {}


@drawn
def gpt2_bf16(device: str) -> Step:
    config = anybody.gpt2(n_embd=1024, n_head=16, n_layer=4)
    model, loss = anybody.language_model(config, device, torch.bfloat16, 4, 1024)
    return step_of(torch.optim.AdamW(model.parameters()), loss, device)


@drawn
def falcon_autocast(device: str) -> Step:
    from transformers import FalconConfig

    shape = dict(hidden_size=768, num_hidden_layers=4, num_attention_heads=12, vocab_size=32000)
    model, loss = anybody.language_model(FalconConfig(**shape), device, torch.float32, 4, 1024)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return step_of(optimizer, loss, device, autocast=torch.bfloat16)


@drawn
def bert_fp32(device: str) -> Step:
    from transformers import BertConfig

    config = BertConfig(num_hidden_layers=4)
    model, loss = anybody.encoder("AutoModelForMaskedLM", config, device, 16, 256)
    return step_of(torch.optim.AdamW(model.parameters()), loss, device)


@drawn
def torch_encoder_bf16_dropout(device: str) -> Step:
    layer = lambda: nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)  # noqa: E731
    model = anybody.built(lambda: nn.TransformerEncoder(layer(), 4), device).bfloat16()
    x = torch.randn(16, 512, 512, device=device, dtype=torch.bfloat16)
    return step_of(torch.optim.AdamW(model.parameters()), lambda: model(x).square().mean(), device)


class Attending(nn.Module):
    """Four layers of attention and a feed-forward network."""

    def __init__(self, bias: bool, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        linear = functools.partial(nn.Linear, bias=bias)
        self.qkv = nn.ModuleList(linear(768, 3 * 768) for _ in range(4))
        self.out = nn.ModuleList(linear(768, 768) for _ in range(4))
        self.wide = nn.ModuleList(linear(768, 3072) for _ in range(4))
        self.back = nn.ModuleList(linear(3072, 768) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for qkv, out, wide, back in zip(self.qkv, self.out, self.wide, self.back, strict=True):
            q, k, v = qkv(F.layer_norm(x, (768,))).unflatten(-1, (3, 12, 64)).unbind(2)
            heads = (each.transpose(1, 2) for each in (q, k, v))
            attended = F.scaled_dot_product_attention(*heads, is_causal=self.causal)
            x = x + out(attended.transpose(1, 2).flatten(2))
            x = x + back(F.gelu(wide(F.layer_norm(x, (768,)))))
        return x


def attending(device: str, bias: bool, causal: bool, autocast: bool) -> Step:
    dtype = torch.float32 if autocast else torch.bfloat16
    model = anybody.built(lambda: Attending(bias, causal), device).to(dtype)
    x = torch.randn(8, 512, 768, device=device, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loss = lambda: model(x).float().square().mean()  # noqa: E731
    return step_of(optimizer, loss, device, autocast=torch.bfloat16 if autocast else None)


@drawn
def full_attention_bf16(device: str) -> Step:
    return attending(device, bias=False, causal=False, autocast=False)


@drawn
def full_attention_autocast(device: str) -> Step:
    return attending(device, bias=False, causal=False, autocast=True)


@drawn
def causal_attention_autocast_biased(device: str) -> Step:
    return attending(device, bias=True, causal=True, autocast=True)


@drawn
def causal_attention_bf16(device: str) -> Step:
    return attending(device, bias=False, causal=True, autocast=False)


TABLE = anybody.TABLE.with_name("anybody_compiled.json")
COMPILED = {f"{name}_compiled": whole(name) for name in NAMES}
COMPILED |= {f"drawn_{name}_compiled": whole(name) for name in DRAWN}

if __name__ in ("__main__", "__mp_main__"):  # also in the processes that measure
    anybody.CONFIGURATIONS |= COMPILED
if __name__ == "__main__":
    anybody.main(list(COMPILED), TABLE)
