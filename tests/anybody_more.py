"""Twenty-eight further training steps that are not this project's, by the way of `anybody.py`.

    python tests/anybody_more.py              predict all; needs no GPU
    python tests/anybody_more.py --measure    measure all on a GPU, and show the errors

Predictions lie in `reports/predictions/anybody_more.json` before anything is measured; with the 32
of `anybody.py` they are sixty. Compare only where transformers has the version that the
predictions name: another one may run other operators.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import anybody
import torch
from anybody import Step, built, language_model, step_of, tokens
from torch import Tensor, nn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 512, "num_experts": 16, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "n_routed_experts": 16,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 2,
}
# Name: model_type, what its config has beside SHAPE, dtype, batch, length, optimizer, options of
# `step_of` (and `recompute`).
ROWS: dict[str, tuple[str, dict[str, Any], torch.dtype, int, int, str, dict[str, Any]]] = {
    "qwen2_bf16_fused": ("qwen2", {}, BF16, 4, 2048, "fused", {}),
    "qwen2_autocast": ("qwen2", {}, FP32, 4, 1024, "adamw", {"autocast": BF16, "clip": True}),
    "qwen2_recomputed_sgd": ("qwen2", {}, BF16, 8, 2048, "sgd", {"recompute": "plain"}),
    "qwen3_moe_bf16": ("qwen3_moe", EXPERTS, BF16, 2, 1024, "fused", {}),
    "mixtral_bf16": ("mixtral", {"num_local_experts": 4}, BF16, 2, 1024, "sgd", {}),
    "deepseek_v3_bf16": ("deepseek_v3", LATENT, BF16, 2, 1024, "fused", {}),
    "gemma3_bf16": ("gemma3_text", {"head_dim": 128}, BF16, 2, 2048, "fused", {}),
    "gemma_autocast": ("gemma", {"head_dim": 128}, FP32, 2, 1024, "adamw", {"autocast": BF16}),
    "phi_bf16": ("phi", {}, BF16, 4, 1024, "adamw", {"clip": True}),
    "opt_fp16_scaler": (
        *("opt", {"ffn_dim": 4096, "word_embed_proj_dim": 1024, "dropout": 0.1}, FP32, 4, 1024),
        *("adamw", {"autocast": FP16, "scaler": True}),
    ),
    "bloom_bf16": ("bloom", {"n_layer": 4, "n_head": 16}, BF16, 4, 1024, "adamw", {}),
    "falcon_bf16": ("falcon", {}, BF16, 4, 2048, "fused", {}),
    "stablelm_autocast": ("stablelm", {}, FP32, 4, 1024, "fused", {"autocast": BF16}),
    "starcoder2_bf16": ("starcoder2", {}, BF16, 4, 2048, "adamw", {"accumulate": 2}),
    "cohere_bf16": ("cohere", {}, BF16, 4, 1024, "fused", {}),
    "glm4_bf16": ("glm4", {"head_dim": 64}, BF16, 4, 1024, "adafactor", {}),
    "granite_fp32": ("granite", {}, FP32, 2, 1024, "adamw", {}),
    "olmo3_bf16": ("olmo3", {}, BF16, 4, 1024, "fused", {"clip": True}),
    "nemotron_bf16": ("nemotron", {}, BF16, 4, 1024, "fused", {"recompute": "reentrant"}),
}


def optimizer_of(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if kind == "adafactor":
        return torch.optim.Adafactor(parameters)
    return torch.optim.AdamW(parameters, fused=kind == "fused" or None)


def of_row(name: str) -> Callable[[str], Step]:
    kind, more, dtype, batch, length, optimizer, options = ROWS[name]
    recompute = {key: options[key] for key in ("recompute",) if key in options}
    others = {key: value for key, value in options.items() if key != "recompute"}

    def make(device: str) -> Step:
        from transformers import AutoConfig

        config = AutoConfig.for_model(kind, **SHAPE | more)
        model, loss = language_model(config, device, dtype, batch, length, **recompute)
        return step_of(optimizer_of(optimizer, model.parameters()), loss, device, **others)

    return make


def masked(kind: str, device: str, optimizer: str, **options: Any) -> Step:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, num_hidden_layers=6)
    model, loss = anybody.encoder("AutoModelForMaskedLM", config, device, 16, 256)
    return step_of(optimizer_of(optimizer, model.parameters()), loss, device, **options)


def roberta_autocast(device: str) -> Step:
    return masked("roberta", device, "fused", autocast=BF16)


def electra_fp16_scaler(device: str) -> Step:
    return masked("electra", device, "adamw", autocast=FP16, scaler=True, clip=True)


def pictures(kind: str, config: dict[str, Any], device: str, **options: Any) -> Step:
    from transformers import AutoConfig

    made = AutoConfig.for_model(kind, num_labels=1000, **config)
    model = anybody.from_config("AutoModelForImageClassification", made, device)
    x, labels = torch.randn(32, 3, 224, 224, device=device), tokens(1000, 1, 32, device)[0]
    loss = lambda: model(pixel_values=x, labels=labels).loss  # noqa: E731
    return step_of(optimizer_of("adamw", model.parameters()), loss, device, **options)


def swin_autocast(device: str) -> Step:
    return pictures("swin", {}, device, autocast=BF16)


def dinov2_fp32(device: str) -> Step:
    return pictures("dinov2", {"num_hidden_layers": 6}, device, clip=True)


def hubert_autocast(device: str) -> Step:
    from transformers import AutoConfig

    config = AutoConfig.for_model("hubert", num_hidden_layers=4, num_labels=16, mask_time_prob=0.0)
    model = anybody.from_config("AutoModelForAudioClassification", config, device)
    sound, labels = torch.randn(4, 80_000, device=device), tokens(16, 1, 4, device)[0]
    loss = lambda: model(input_values=sound, labels=labels).loss  # noqa: E731
    return step_of(optimizer_of("adamw", model.parameters()), loss, device, autocast=BF16)


def torch_decoder_bf16(device: str) -> Step:
    layer = lambda: nn.TransformerDecoderLayer(512, 8, 2048, batch_first=True)  # noqa: E731
    model = built(lambda: nn.TransformerDecoder(layer(), 4), device).to(BF16)
    x, memory = (torch.randn(16, n, 512, device=device, dtype=BF16) for n in (256, 384))
    loss = lambda: model(x, memory).square().mean()  # noqa: E731
    return step_of(optimizer_of("fused", model.parameters()), loss, device)


def lstm_bidirectional_fp16(device: str) -> Step:
    model = built(lambda: nn.LSTM(512, 768, 2, bidirectional=True), device)
    x = torch.randn(128, 64, 512, device=device)
    loss = lambda: model(x)[0].float().square().mean()  # noqa: E731
    optimizer = optimizer_of("adamw", model.parameters())
    return step_of(optimizer, loss, device, autocast=FP16, scaler=True)


def video_fp32(device: str) -> Step:
    """Convolutions over space and time."""
    layers = lambda: nn.Sequential(  # noqa: E731
        *(nn.Conv3d(3, 32, 3, padding=1), nn.BatchNorm3d(32), nn.ReLU(), nn.MaxPool3d(2)),
        *(nn.Conv3d(32, 64, 3, padding=1), nn.BatchNorm3d(64), nn.ReLU()),
        *(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(64, 100)),
    )
    model = built(layers, device)
    x, labels = torch.randn(8, 3, 16, 112, 112, device=device), tokens(100, 1, 8, device)[0]
    loss = lambda: nn.functional.cross_entropy(model(x), labels)  # noqa: E731
    return step_of(optimizer_of("sgd", model.parameters()), loss, device)


def llama_parallel_two(device: str) -> Step:
    """One of two processes of DistributedDataParallel; alone with `--measure` it needs torchrun."""
    import torch.distributed as dist

    os.environ.setdefault("WORLD_SIZE", "2")
    dist.init_process_group("nccl")
    model, _ = language_model(anybody.llama(num_hidden_layers=4), device, BF16, 4, 1024)
    parallel = nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    ids = tokens(32_000, 4, 1024, device)

    def loss() -> Tensor:
        found: Tensor = parallel(input_ids=ids, labels=ids).loss
        return found

    return step_of(optimizer_of("fused", parallel.parameters()), loss, device)


OTHERS = (
    *(roberta_autocast, electra_fp16_scaler, swin_autocast, dinov2_fp32, hubert_autocast),
    *(torch_decoder_bf16, lstm_bidirectional_fp16, video_fp32, llama_parallel_two),
)

TABLE = anybody.TABLE.with_name("anybody_more.json")
MORE = {name: of_row(name) for name in ROWS} | {function.__name__: function for function in OTHERS}
anybody.CONFIGURATIONS |= MORE  # also in the processes that measure

if __name__ == "__main__":
    anybody.main(list(MORE), TABLE)
