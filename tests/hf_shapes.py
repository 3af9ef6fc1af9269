"""Public models' shapes, as their `config.json` say them, with the parameters that their weights
have.

    python tests/hf_shapes.py        what `lsai predict --hf` makes of each, as a table

Reduced to the keys that decide a shape; sources are the files beside the published weights.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


@dataclass(frozen=True)
class Shape:
    """`refused`: words of the reason, where such a file is refused."""

    config: dict[str, Any]
    parameters: int = 0
    refused: str = ""


def decoder(
    kind: str, width: int, hidden: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


def llama(*shape: int, vocabulary: int = 128_256, tied: bool = False) -> dict[str, Any]:
    more = {"vocab_size": vocabulary, "tie_word_embeddings": tied, "rms_norm_eps": 1e-5}
    return decoder("llama", *shape, **more)


def qwen(kind: str, *shape: int, vocabulary: int = 151_936, **more: Any) -> dict[str, Any]:
    return decoder(kind, *shape, vocab_size=vocabulary, rms_norm_eps=1e-6, **more)


TIED = {"tie_word_embeddings": True}
SHAPES: dict[str, Shape] = {
    "Llama 2 7B": Shape(llama(4096, 11008, 32, 32, 32, vocabulary=32_000), 6_738_415_616),
    "Llama 3 8B": Shape(llama(4096, 14336, 32, 32, 8), 8_030_261_248),
    "Llama 3.1 70B": Shape(llama(8192, 28672, 80, 64, 8), 70_553_706_496),
    "Llama 3.2 1B": Shape(llama(2048, 8192, 16, 32, 8, tied=True), 1_235_814_400),
    "Llama 3.2 3B": Shape(llama(3072, 8192, 28, 24, 8, tied=True), 3_212_749_824),
    "TinyLlama 1.1B": Shape(llama(2048, 5632, 22, 32, 4, vocabulary=32_000), 1_100_048_384),
    "SmolLM2 135M": Shape(llama(576, 1536, 30, 9, 3, vocabulary=49_152, tied=True), 134_515_008),
    "Yi 6B": Shape(llama(4096, 11008, 32, 32, 4, vocabulary=64_000), 6_061_035_520),
    "Mistral 7B": Shape(
        decoder("mistral", 4096, 14336, 32, 32, 8, vocab_size=32_000, rms_norm_eps=1e-5),
        7_241_732_096,
    ),
    "Phi-3 mini": Shape(
        decoder("phi3", 3072, 8192, 32, 32, 32, vocab_size=32_064, rms_norm_eps=1e-5),
        3_821_079_552,
    ),
    "SmolLM3 3B": Shape(
        decoder("smollm3", 2048, 11008, 36, 16, 4, vocab_size=128_256, rms_norm_eps=1e-6, **TIED),
        3_075_098_624,
    ),
    "Qwen2.5 0.5B": Shape(qwen("qwen2", 896, 4864, 24, 14, 2, **TIED), 494_032_768),
    "Qwen2.5 1.5B": Shape(qwen("qwen2", 1536, 8960, 28, 12, 2, **TIED), 1_543_714_304),
    "Qwen2.5 7B": Shape(qwen("qwen2", 3584, 18944, 28, 28, 4, vocabulary=152_064), 7_615_616_512),
    "Qwen3 0.6B": Shape(qwen("qwen3", 1024, 3072, 28, 16, 8, head_dim=128, **TIED), 596_049_920),
    "Qwen3 8B": Shape(qwen("qwen3", 4096, 12288, 36, 32, 8, head_dim=128), 8_190_735_360),
    "Qwen3 30B-A3B": Shape(
        qwen("qwen3_moe", 2048, 6144, 48, 32, 4, head_dim=128)
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        30_532_122_624,
    ),
    "Gemma 2B": Shape(
        decoder("gemma", 2048, 16384, 18, 8, 1, head_dim=256, vocab_size=256_000), 2_506_172_416
    ),
    "Gemma 2 2B": Shape(
        decoder("gemma2", 2304, 9216, 26, 8, 4, head_dim=256, vocab_size=256_000), 2_614_341_888
    ),
    "Gemma 2 9B": Shape(
        decoder("gemma2", 3584, 14336, 42, 16, 8, head_dim=256, vocab_size=256_000), 9_241_705_984
    ),
    "Gemma 3 1B": Shape(
        decoder("gemma3_text", 1152, 6912, 26, 4, 1, head_dim=256, vocab_size=262_144),
        999_885_952,
    ),
    "OLMo 1B": Shape(
        decoder("olmo", 2048, 8192, 16, 16, 16, vocab_size=50_304, **TIED), 1_176_764_416
    ),
    "OLMo 2 7B": Shape(
        decoder("olmo2", 4096, 11008, 32, 32, 32, vocab_size=100_352), 7_298_617_344
    ),
    "GPT-2": Shape({"model_type": "gpt2", "n_layer": 12}, 124_439_808),
    "GPT-2 XL": Shape(
        {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48}, 1_557_611_200
    ),
    "Pythia 160M": Shape(
        decoder("gpt_neox", 768, 3072, 12, 12, 12, vocab_size=50_304), 162_322_944
    ),
    "Pythia 6.9B": Shape(
        decoder("gpt_neox", 4096, 16384, 32, 32, 32, vocab_size=50_432), 6_857_302_016
    ),
    "OPT 6.7B": Shape(
        {"model_type": "opt", "hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "word_embed_proj_dim": 4096, "vocab_size": 50_272},
        6_658_473_984,
    ),
    "Phi-2": Shape(decoder("phi", 2560, 10240, 32, 32, 32, vocab_size=51_200), 2_779_683_840),
    "Falcon 7B": Shape(
        {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32}
        | {"num_attention_heads": 71, "vocab_size": 65_024, "multi_query": True}
        | {"parallel_attn": True, "bias": False, "new_decoder_architecture": False},
        6_921_720_704,
    ),
    "BLOOM 560M": Shape(
        {"model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16}
        | {"vocab_size": 250_880},
        559_214_592,
    ),
    "StarCoder2 3B": Shape(
        decoder("starcoder2", 3072, 12288, 30, 24, 2, vocab_size=49_152, **TIED), 3_030_371_328
    ),
    "Mixtral 8x7B": Shape(
        decoder("mixtral", 4096, 14336, 32, 32, 8, vocab_size=32_000)
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        46_702_792_704,
    ),
    "T5 small": Shape(
        {"model_type": "t5", "d_model": 512, "vocab_size": 32_128, "decoder_start_token_id": 0},
        60_506_624,
    ),
    "BERT base": Shape({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, 109_514_298),
    "ChatGLM2 6B": Shape(
        {"model_type": "chatglm", "hidden_size": 4096, "ffn_hidden_size": 13696, "num_layers": 28}
        | {"auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"}},
        refused="is not known to transformers .*never runs",
    ),
    "RWKV-5 World 3B": Shape(
        {"model_type": "rwkv5", "hidden_size": 2560, "num_hidden_layers": 32}
        | {"auto_map": {"AutoConfig": "configuration_rwkv5.Rwkv5Config"}},
        refused="is not known to transformers .*never runs",
    ),
}


def found_for(name: str, folder: Path, layers: int | None = None) -> dict[str, Any]:
    """`parameters`, and peaks of a step of 512 tokens, of `layers` layers if given; UserError where
    the file is refused."""
    import torch

    from lsai_core import TrainConfig, predict
    from lsai_core.config.strict import validated
    from lsai_core.model.hf_config import AnotherModel, describe
    from lsai_core.model.transformer import count_parameters
    from lsai_core.profiling.gpus import find_gpu
    from lsai_lab.predictions.hf_models import HfStep, hf_model, predict_hf

    config = dict(SHAPES[name].config)
    for key in {"num_hidden_layers", "n_layer"} & config.keys() if layers else ():
        config[key] = layers
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    try:
        shape = describe(path).model
    except AnotherModel:
        model = hf_model(path)
        if layers is not None:
            return predict_hf(model, HfStep(512, 1), [find_gpu("h100")], path)
        with torch.device("meta"):
            built = model.build(model.config)
        return {"parameters": sum({id(p): p.numel() for p in built.parameters()}.values())}
    found: dict[str, Any] = {"parameters": count_parameters(shape).total}
    if layers is not None:
        data = {"model": shape.model_dump(), "seq_len": 512, "batch_size": 1, "precision": "bf16"}
        found["allocated_gib"] = predict(validated(TrainConfig, data, name)).peak
    return found


def main() -> None:
    from lsai_core.base.errors import UserError

    served = 0
    print("| model | kind | parameters | step of two layers, GiB |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in SHAPES.items():
            try:
                count = found_for(name, Path(folder))["parameters"]
                peak = found_for(name, Path(folder), 2)["allocated_gib"]
            except UserError as error:
                line = str(error).replace(folder, "")
                print(f"| {name} | {shape.config['model_type']} | refused: {line} | |", flush=True)
                continue
            served += 1
            exact = "" if count == shape.parameters else f" (published {shape.parameters:,})"
            kind = shape.config["model_type"]
            print(f"| {name} | {kind} | {count:,}{exact} | {peak:.2f} |", flush=True)
    print(f"{served} of {len(SHAPES)} served")


if __name__ == "__main__":
    main()
