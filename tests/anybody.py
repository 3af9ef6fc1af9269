"""Training steps that are not this project's, predicted and measured.

    python tests/anybody.py                  predict all; needs no GPU
    python tests/anybody.py --measure        measure all on a GPU, and show the errors
    python tests/anybody.py --only llama     those whose names hold a word
    python tests/anybody.py --into FILE      predictions go there, and are compared from there

Each configuration is a function of a device that builds a model and an optimizer and returns one
step. Predictions lie in `reports/predictions/anybody.json` before anything is measured; those of
`anybody.in_sample.json` were made afterwards, by code that learned from the measured figures. Every
configuration has a process of its own, for libraries keep workspaces.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))

TABLE = Path(__file__).parents[1] / "reports" / "predictions" / "anybody.json"
STEPS = 3
GIB = 2**30
Step = Callable[[], None]
CONFIGURATIONS: dict[str, Callable[[str], Step]] = {}


def configuration(function: Callable[[str], Step]) -> Callable[[str], Step]:
    CONFIGURATIONS[function.__name__] = function
    return function


def step_of(
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[], Tensor],
    device: str,
    *,
    autocast: torch.dtype | None = None,
    accumulate: int = 1,
    scaler: bool = False,
    clip: bool = False,
) -> Step:
    """A training step as people write it."""
    scale = torch.amp.GradScaler(device, enabled=scaler)

    def step() -> None:
        for _ in range(accumulate):
            context = (
                contextlib.nullcontext()
                if autocast is None
                else torch.autocast(device, dtype=autocast)
            )
            with context:
                loss = loss_of() / accumulate
            scale.scale(loss).backward()
        if clip:
            scale.unscale_(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, 1.0)
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def from_config(kind: str, config: Any, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """A Hugging Face model with fresh weights, ready to train."""
    import transformers

    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = getattr(transformers, kind).from_config(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.to(dtype).train()


def tokens(vocabulary: int, batch: int, length: int, device: str) -> Tensor:
    return torch.randint(vocabulary, (batch, length), device=device)


def language_model(
    config: Any, device: str, dtype: torch.dtype, batch: int, length: int, **options: Any
) -> tuple[Any, Callable[[], Tensor]]:
    model = from_config("AutoModelForCausalLM", config, device, dtype)
    model.config.use_cache = False
    if options.get("recompute"):
        reentrant = {"use_reentrant": options["recompute"] == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=reentrant)
    ids = tokens(config.vocab_size, batch, length, device)
    return model, lambda: model(input_ids=ids, labels=ids).loss


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig

    shape = dict(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16
    )
    return LlamaConfig(**shape | dict(num_key_value_heads=4, vocab_size=32000) | changes)


@configuration
def llama_bf16_adamw(device: str) -> Step:
    model, loss = language_model(llama(), device, torch.bfloat16, 4, 1024)
    return step_of(torch.optim.AdamW(model.parameters()), loss, device)


@configuration
def llama_bf16_fused_clip(device: str) -> Step:
    model, loss = language_model(llama(), device, torch.bfloat16, 4, 2048)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return step_of(optimizer, loss, device, clip=True)


@configuration
def llama_autocast_accumulated(device: str) -> Step:
    model, loss = language_model(llama(), device, torch.float32, 4, 1024)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return step_of(optimizer, loss, device, autocast=torch.bfloat16, accumulate=2)


@configuration
def llama_fp16_scaler(device: str) -> Step:
    model, loss = language_model(llama(), device, torch.float32, 4, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    return step_of(optimizer, loss, device, autocast=torch.float16, scaler=True, clip=True)


@configuration
def llama_reentrant_sgd(device: str) -> Step:
    model, loss = language_model(llama(), device, torch.bfloat16, 8, 2048, recompute="reentrant")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return step_of(optimizer, loss, device)


@configuration
def qwen3_recomputed(device: str) -> Step:
    from transformers import Qwen3Config

    shape = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=8)
    heads = dict(num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=65536)
    config = Qwen3Config(**shape, **heads)
    model, loss = language_model(config, device, torch.bfloat16, 4, 2048, recompute="plain")
    return step_of(torch.optim.AdamW(model.parameters()), loss, device, clip=True)


def gpt2(**changes: Any) -> Any:
    from transformers import GPT2Config

    return GPT2Config(**dict(n_embd=768, n_layer=8, n_head=12, n_positions=1024) | changes)


@configuration
def gpt2_fp32_no_dropout(device: str) -> Step:
    config = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model, loss = language_model(config, device, torch.float32, 4, 1024)
    return step_of(torch.optim.AdamW(model.parameters()), loss, device)


@configuration
def gpt2_autocast_dropout(device: str) -> Step:
    model, loss = language_model(gpt2(), device, torch.float32, 8, 1024)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return step_of(optimizer, loss, device, autocast=torch.bfloat16)


@configuration
def gpt2_eager_attention(device: str) -> Step:
    config = gpt2(attn_implementation="eager", n_layer=4)
    model, loss = language_model(config, device, torch.bfloat16, 8, 1024)
    return step_of(torch.optim.AdamW(model.parameters()), loss, device)


@configuration
def neox_bf16_adafactor(device: str) -> Step:
    from transformers import GPTNeoXConfig

    shape = dict(hidden_size=1024, num_hidden_layers=8, num_attention_heads=16)
    config = GPTNeoXConfig(**shape, intermediate_size=4096, vocab_size=50304)
    model, loss = language_model(config, device, torch.bfloat16, 4, 1024)
    return step_of(torch.optim.Adafactor(model.parameters()), loss, device)


@configuration
def mistral_window(device: str) -> Step:
    from transformers import MistralConfig

    shape = dict(hidden_size=1024, intermediate_size=3584, num_hidden_layers=4)
    heads = dict(num_attention_heads=16, num_key_value_heads=4, sliding_window=256)
    config = MistralConfig(**shape, **heads, vocab_size=32000)
    model, loss = language_model(config, device, torch.bfloat16, 2, 2048)
    return step_of(torch.optim.AdamW(model.parameters()), loss, device)


@configuration
def gemma2_bf16(device: str) -> Step:
    from transformers import Gemma2Config

    shape = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, head_dim=128)
    heads = dict(num_attention_heads=8, num_key_value_heads=4, vocab_size=65536)
    model, loss = language_model(Gemma2Config(**shape, **heads), device, torch.bfloat16, 2, 1024)
    return step_of(torch.optim.AdamW(model.parameters()), loss, device)


@configuration
def phi3_frozen_but_last(device: str) -> Step:
    from transformers import Phi3Config

    shape = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=8)
    heads = dict(num_attention_heads=16, vocab_size=32064, pad_token_id=0)
    model, loss = language_model(Phi3Config(**shape, **heads), device, torch.bfloat16, 4, 1024)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.7" in name or "lm_head" in name)
    learned = [p for p in model.parameters() if p.requires_grad]
    return step_of(torch.optim.AdamW(learned), loss, device)


@configuration
def olmo2_fp32(device: str) -> Step:
    from transformers import Olmo2Config

    shape = dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=6)
    config = Olmo2Config(**shape, num_attention_heads=12, vocab_size=32000)
    model, loss = language_model(config, device, torch.float32, 4, 512)
    return step_of(torch.optim.RMSprop(model.parameters()), loss, device)


@configuration
def mamba_slow_path(device: str) -> Step:
    from transformers import MambaConfig

    config = MambaConfig(hidden_size=512, num_hidden_layers=2, vocab_size=16000)
    model, loss = language_model(config, device, torch.float32, 4, 128)
    return step_of(torch.optim.AdamW(model.parameters()), loss, device)


def encoder(
    kind: str, config: Any, device: str, batch: int, length: int
) -> tuple[Any, Callable[[], Tensor]]:
    model = from_config(kind, config, device)
    ids = tokens(config.vocab_size, batch, length, device)
    return model, lambda: model(input_ids=ids, labels=ids).loss


@configuration
def bert_autocast(device: str) -> Step:
    from transformers import BertConfig

    model, loss = encoder("AutoModelForMaskedLM", BertConfig(), device, 16, 512)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return step_of(optimizer, loss, device, autocast=torch.bfloat16)


@configuration
def bert_fp32_foreach(device: str) -> Step:
    from transformers import BertConfig

    model, loss = encoder("AutoModelForMaskedLM", BertConfig(), device, 8, 512)
    return step_of(torch.optim.AdamW(model.parameters(), foreach=True), loss, device, clip=True)


@configuration
def t5_bf16(device: str) -> Step:
    from transformers import T5Config

    shape = dict(d_model=512, d_ff=2048, num_layers=6, num_heads=8, vocab_size=32128)
    config = T5Config(**shape, decoder_start_token_id=0)
    model = from_config("AutoModelForSeq2SeqLM", config, device, torch.bfloat16)
    ids, words = tokens(32000, 16, 512, device), tokens(32000, 16, 128, device)
    optimizer = torch.optim.AdamW(model.parameters())
    return step_of(optimizer, lambda: model(input_ids=ids, labels=words).loss, device)


@configuration
def bart_autocast(device: str) -> Step:
    from transformers import BartConfig

    shape = dict(d_model=768, encoder_layers=4, decoder_layers=4, vocab_size=50265)
    model = from_config("AutoModelForSeq2SeqLM", BartConfig(**shape), device)
    ids = tokens(50000, 8, 512, device)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = lambda: model(input_ids=ids, labels=ids).loss  # noqa: E731
    return step_of(optimizer, loss, device, autocast=torch.bfloat16)


@configuration
def whisper_fp16_scaler(device: str) -> Step:
    from transformers import WhisperConfig

    shape = dict(d_model=512, encoder_layers=4, decoder_layers=4, vocab_size=51865)
    heads = dict(encoder_attention_heads=8, decoder_attention_heads=8)
    config = WhisperConfig(**shape, **heads, encoder_ffn_dim=2048, decoder_ffn_dim=2048)
    model = from_config("AutoModelForSpeechSeq2Seq", config, device)
    sound = torch.randn(8, 80, 3000, device=device)
    ids = tokens(50000, 8, 256, device)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = lambda: model(input_features=sound, labels=ids).loss  # noqa: E731
    return step_of(optimizer, loss, device, autocast=torch.float16, scaler=True)


@configuration
def vit_autocast(device: str) -> Step:
    from transformers import ViTConfig

    config = ViTConfig(num_labels=1000)
    model = from_config("AutoModelForImageClassification", config, device)
    pictures, labels = torch.randn(64, 3, 224, 224, device=device), tokens(1000, 1, 64, device)[0]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loss = lambda: model(pixel_values=pictures, labels=labels).loss  # noqa: E731
    return step_of(optimizer, loss, device, autocast=torch.bfloat16)


@configuration
def wav2vec2_fp32(device: str) -> Step:
    from transformers import Wav2Vec2Config

    config = Wav2Vec2Config(num_hidden_layers=4, mask_time_prob=0.0, num_labels=16)
    model = from_config("AutoModelForAudioClassification", config, device)
    sound, labels = torch.randn(4, 80000, device=device), tokens(16, 1, 4, device)[0]
    optimizer = torch.optim.AdamW(model.parameters())
    return step_of(optimizer, lambda: model(input_values=sound, labels=labels).loss, device)


def built(make: Callable[[], nn.Module], device: str) -> nn.Module:
    with torch.device(device):
        return make().train()


@configuration
def torch_encoder_fp32(device: str) -> Step:
    layer = lambda: nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)  # noqa: E731
    model = built(lambda: nn.TransformerEncoder(layer(), 6), device)
    x = torch.randn(16, 512, 512, device=device)
    return step_of(torch.optim.AdamW(model.parameters()), lambda: model(x).square().mean(), device)


@configuration
def torch_encoder_autocast_norm_first(device: str) -> Step:
    layer = lambda: nn.TransformerEncoderLayer(  # noqa: E731
        768, 12, 3072, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    model = built(lambda: nn.TransformerEncoder(layer(), 6, enable_nested_tensor=False), device)
    x = torch.randn(16, 512, 768, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda: model(x).square().mean()  # noqa: E731
    return step_of(optimizer, loss, device, autocast=torch.bfloat16)


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outside, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.short = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x), inplace=True)


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inside = 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(depth):
            layers.append(Bottleneck(inside, width, stride if index == 0 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def classified(model: nn.Module, batch: int, device: str, **layout: Any) -> Callable[[], Tensor]:
    pictures = torch.randn(batch, 3, 224, 224, device=device).to(**layout)
    labels = tokens(1000, 1, batch, device)[0]
    return lambda: F.cross_entropy(model(pictures), labels)


@configuration
def resnet50_fp32_sgd(device: str) -> Step:
    model = built(resnet50, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return step_of(optimizer, classified(model, 64, device), device)


@configuration
def resnet50_autocast_channels_last(device: str) -> Step:
    layout = {"memory_format": torch.channels_last}
    model = built(resnet50, device).to(**layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = classified(model, 128, device, **layout)
    return step_of(optimizer, loss, device, autocast=torch.float16, scaler=True)


def double(inside: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inside, width, 3, padding=1),
        nn.GroupNorm(8, width),
        nn.SiLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.GroupNorm(8, width),
        nn.SiLU(),
    )


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (64, 128, 256)) -> None:
        super().__init__()
        self.down = nn.ModuleList(double(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(
            double(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.out = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for index, part in enumerate(self.down):
            x = part(F.max_pool2d(x, 2) if index else x)
            kept.append(x)
        kept.pop()
        for part in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = part(torch.cat([x, kept.pop()], dim=1))
        return self.out(x)


@configuration
def unet_autocast(device: str) -> Step:
    model = built(UNet, device)
    x = torch.randn(16, 3, 128, 128, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = lambda: F.mse_loss(model(x), x)  # noqa: E731
    return step_of(optimizer, loss, device, autocast=torch.bfloat16)


class ConvNext(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.spread(x).permute(0, 2, 3, 1))
        return x + self.narrow(F.gelu(self.wide(inner))).permute(0, 3, 1, 2)


@configuration
def convnext_fp32(device: str) -> Step:
    blocks = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 96, 4, 4),
        *(ConvNext(96) for _ in range(6)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, 1000),
    )
    model = built(blocks, device)
    return step_of(torch.optim.AdamW(model.parameters()), classified(model, 64, device), device)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(16000, width)
        self.layers = kind(width, width, layers, batch_first=True, dropout=0.1)  # type: ignore[arg-type]
        self.out = nn.Linear(width, 16000)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.out(self.layers(self.table(ids))[0])
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@configuration
def lstm_fp32(device: str) -> Step:
    model = built(lambda: Recurrent(nn.LSTM, 1024, 3), device)
    ids = tokens(16000, 32, 256, device)
    return step_of(torch.optim.Adam(model.parameters()), lambda: model(ids), device, clip=True)


@configuration
def gru_autocast(device: str) -> Step:
    model = built(lambda: Recurrent(nn.GRU, 1024, 2), device)
    ids = tokens(16000, 32, 256, device)
    optimizer = torch.optim.Adam(model.parameters())
    return step_of(optimizer, lambda: model(ids), device, autocast=torch.bfloat16)


class Mixer(nn.Module):
    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places = nn.Sequential(nn.Linear(places, 512), nn.GELU(), nn.Linear(512, places))
        self.channels = nn.Sequential(nn.Linear(width, 2048), nn.GELU(), nn.Linear(2048, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(self.first(x).mT).mT
        return x + self.channels(self.second(x))


@configuration
def mixer_recomputed(device: str) -> Step:
    model = built(lambda: nn.ModuleList(Mixer(196, 512) for _ in range(8)), device)
    x = torch.randn(64, 196, 512, device=device, requires_grad=True)

    def loss() -> Tensor:
        y = x
        for block in model:
            y = checkpoint(block, y, use_reentrant=False)
        return y.square().mean()

    return step_of(torch.optim.AdamW(model.parameters(), fused=True), loss, device)


@configuration
def perceptron_with_tables(device: str) -> Step:
    """A recommender: tables of words that are summed, and a perceptron."""
    tables = built(
        lambda: nn.ModuleList(nn.EmbeddingBag(200_000, 64, mode="sum") for _ in range(8)), device
    )
    layers = [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)]
    model = built(lambda: nn.Sequential(*layers), device).to(device)
    words = torch.randint(200_000, (8, 8192, 16), device=device)
    wanted = torch.rand(8192, device=device)

    def loss() -> Tensor:
        found = model(torch.cat([table(ids) for table, ids in zip(tables, words, strict=True)], 1))
        return F.binary_cross_entropy_with_logits(found.squeeze(1), wanted)

    parameters = [*tables.parameters(), *model.parameters()]
    return step_of(torch.optim.Adagrad(parameters), loss, device)


def versions() -> dict[str, str]:
    """Of what decides which operators run."""
    from importlib.metadata import version

    return {"torch": torch.__version__, "transformers": version("transformers")}


def predict(name: str) -> dict[str, Any]:
    """What is predicted of a configuration, in GiB."""
    from lsai_core import simulated_gpu

    started = time.perf_counter()
    try:
        with simulated_gpu("h100") as gpu:
            step = CONFIGURATIONS[name]("cuda")
            for _ in range(STEPS):
                step()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "allocated": gpu.peak_allocated_gib,
        "reserved": gpu.peak_reserved_gib,
        "phases": gpu.phases,
        **versions(),
        "seconds": round(time.perf_counter() - started, 1),
    }


def measure(name: str) -> dict[str, Any]:
    """What a GPU says, in GiB."""
    started = time.perf_counter()
    try:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))  # of torchrun
        torch.cuda.memory._record_memory_history(context=None, max_entries=400_000)
        step = CONFIGURATIONS[name]("cuda")
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    found = torch.cuda.memory_stats()
    peaks = {
        name: found[f"{name}_bytes.all.peak"] / GIB
        for name in ("allocated", "active", "reserved", "requested")
    }
    about = {"gpu": torch.cuda.get_device_name(), **versions()}
    return {
        **peaks,
        **about,
        "seconds": round(time.perf_counter() - started, 1),
        **blocks(torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]),
    }


def blocks(trace: list[dict[str, Any]]) -> dict[str, list[list[int]]]:
    """[bytes, how many] of what was held at the peak, and of all that was ever asked for, the
    largest first."""
    held: dict[int, int] = {}
    asked, at_peak = Counter[int](), Counter[int]()
    live = highest = 0
    for event in trace:
        if event["action"] == "alloc":
            held[event["addr"]] = event["size"]
            asked[event["size"]] += 1
            live += event["size"]
            if live > highest + 2**20:
                highest, at_peak = live, Counter(held.values())
        elif event["action"] == "free_completed":
            live -= held.pop(event["addr"], 0)
    return {
        "at_peak": [[size, at_peak[size]] for size in sorted(at_peak, reverse=True)[:40]],
        "asked": [[size, asked[size]] for size in sorted(asked, reverse=True)[:60]],
    }


def each(
    function: Callable[[str], Any], names: list[str], beside: int, start: str
) -> dict[str, Any]:
    """`function` of every name, each in a new process of which so many run at a time; `start` is
    `spawn` where a GPU is used, which a forked process could not begin to."""
    with multiprocessing.get_context(start).Pool(beside, maxtasksperchild=1) as pool:
        waiting = {name: pool.apply_async(function, (name,)) for name in names}
        found = {}
        for name, answer in waiting.items():
            found[name] = answer.get(timeout=600)
            shown = {k: v for k, v in found[name].items() if k not in ("at_peak", "asked")}
            print(name, shown, flush=True)
    return found


def table(predicted: dict[str, Any], measured: dict[str, Any]) -> str:
    """The errors, in percent."""
    lines = [f"{'':36}{'active':>8}{'error':>8}{'reserved':>10}{'error':>8}"]
    for name, found in measured.items():
        said = predicted.get(name, {"error": "not predicted"})
        if "error" in found or "error" in said:
            lines.append(f"{name:36}{found.get('error', said.get('error'))}"[:140])
            continue
        active = 100 * (said["allocated"] / found["active"] - 1)
        reserved = 100 * (said["reserved"] / found["reserved"] - 1)
        lines.append(
            f"{name:36}{found['active']:8.3f}{active:+8.1f}{found['reserved']:10.3f}{reserved:+8.1f}"
        )
    return "\n".join(lines)


def import_once() -> None:
    """What every process needs, before they begin."""
    import torch._dynamo  # noqa: F401
    import transformers

    models = "llama qwen3 gpt2 gpt_neox mistral gemma2 phi3 olmo2 mamba bert t5 bart whisper vit"
    for name in (*models.split(), "wav2vec2"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    for name in ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification"):
        getattr(transformers, f"AutoModelFor{name}")


def main(configurations: list[str], table_path: Path) -> None:
    """The command line over `configurations`, whose predictions lie in `table_path`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--beside", type=int, default=1)
    parser.add_argument("--into", type=Path, default=table_path, help="a file of predictions")
    parser.add_argument("--write", type=Path, help="where measured figures go, as JSON")
    asked = parser.parse_args()

    names = [name for name in configurations if asked.only in name]
    kept = json.loads(asked.into.read_text()) if asked.into.exists() else {}
    if not asked.measure:
        import_once()
        kept |= each(predict, names, asked.beside, "fork")
        asked.into.write_text(json.dumps(kept, indent=1) + "\n")
        return
    measured = each(measure, names, asked.beside, "spawn")
    if asked.write and os.environ.get("RANK", "0") == "0":
        asked.write.write_text(json.dumps(measured, indent=1) + "\n")
    print(table(kept, measured))


if __name__ == "__main__":
    main(list(CONFIGURATIONS), TABLE)
