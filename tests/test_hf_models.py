"""Models of Hugging Face that are not this package's, predicted by transformers' own code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Project

from lsai_core.base.errors import UserError
from lsai_core.model.hf_config import OTHERS
from lsai_core.profiling.gpus import find_gpu
from lsai_lab.predictions.hf_models import HfStep, hf_model, predict_hf

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "n_routed_experts": 4}
EXPERTS |= {"num_experts_per_tok": 2}
# What a small model of a kind has in other words, or its defaults would be large or contradict it.
OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 8},
    "qwen2_moe": {"shared_expert_intermediate_size": 32, **EXPERTS},
    "qwen3_moe": EXPERTS,
    "glm4_moe": EXPERTS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {**EXPERTS, "q_lora_rank": 16, "kv_lora_rank": 16, "n_group": 1}
    | {"num_key_value_heads": 4},  # its own attention has as many of them as of queries
    "t5": {"d_model": 64, "d_ff": 128, "num_layers": 2, "decoder_start_token_id": 0},
    "mt5": {"d_model": 64, "d_ff": 128, "num_layers": 2, "decoder_start_token_id": 0},
    "bart": {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64},
    "vit": {"image_size": 32, "patch_size": 8},
    "whisper": {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "max_source_positions": 64}
    | {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
}
FAST = ("qwen2", "qwen3", "gemma2", "olmo2", "gpt2", "gpt_neox", "mixtral", "qwen3_moe", "t5")
# The step of the recurrent kinds is long; the others need parts that are described by themselves.
LEFT_OUT = (
    *("mamba", "rwkv", "mamba2", "gemma3", "llama4", "dbrx", "deepseek_v2", "llava", "mllama"),
    *("qwen2_vl", "qwen2_5_vl", "gpt_neo"),
)
H100 = find_gpu("h100")


def written(folder: Path, kind: str, **more: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(SMALL | OWN.get(kind, {}) | {"model_type": kind} | more))
    return path


def served(folder: Path, kind: str, **step: Any) -> dict[str, Any]:
    path = written(folder, kind)
    return predict_hf(hf_model(path), HfStep(64, 2, **step), [H100], path)


@pytest.mark.parametrize("kind", FAST)
def test_known_kinds_are_served(kind: str, tmp_path: Path) -> None:
    found = served(tmp_path, kind)
    assert 0 < found["parameters"] < 10**8
    weights = 2 * found["parameters"] / 2**30
    assert found["allocated_gib"] > 4 * weights and found["gpus"][0]["verdict"] == "fits"


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(OTHERS) - set(FAST) - set(LEFT_OUT)))
def test_other_kinds_are_served(kind: str, tmp_path: Path) -> None:
    assert served(tmp_path, kind)["parameters"] > 0


def test_precision_recomputation_and_accumulation_change_what_they_should(tmp_path: Path) -> None:
    plain, wide = served(tmp_path, "qwen3"), served(tmp_path, "qwen3", precision="fp32")
    cast = served(tmp_path, "qwen3", precision="bf16_autocast")
    assert plain["parameters"] == wide["parameters"] == cast["parameters"]
    states = [found["phases_gib"]["optimizer"] for found in (plain, wide, cast)]
    assert states[0] < states[1] == pytest.approx(states[2], rel=0.05)
    again = served(tmp_path, "qwen3", recompute=True)
    assert again["allocated_gib"] < plain["allocated_gib"]
    assert served(tmp_path, "qwen3", accumulate=2)["allocated_gib"] >= plain["allocated_gib"]


LARGE: dict[str, tuple[dict[str, Any], int]] = {
    "GPT-2": ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, 124_439_808),
    "Qwen2.5 0.5B": (
        {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864}
        | {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
        | {"vocab_size": 151_936, "tie_word_embeddings": True},
        494_032_768,
    ),
    "Qwen3 0.6B": (
        {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
        | {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
        | {"vocab_size": 151_936, "tie_word_embeddings": True},
        596_049_920,
    ),
    "Gemma 2 2B": (
        {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256}
        | {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4},
        2_614_341_888,
    ),
    "Pythia 160M": (
        {"model_type": "gpt_neox", "hidden_size": 768, "intermediate_size": 3072}
        | {"num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50_304},
        162_322_944,
    ),
    "Mixtral 8x7B": (
        {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14_336}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"vocab_size": 32_000, "num_local_experts": 8, "num_experts_per_tok": 2},
        46_702_792_704,
    ),
    "T5 small": ({"model_type": "t5", "d_model": 512, "vocab_size": 32_128}, 60_506_624),
    "OPT 125M": ({"model_type": "opt"}, 125_239_296),
}


@pytest.mark.parametrize("name", LARGE)
def test_published_shapes_have_their_parameters(name: str, tmp_path: Path) -> None:
    data, parameters = LARGE[name]
    (tmp_path / "config.json").write_text(json.dumps(data))
    model = hf_model(tmp_path)
    with torch.device("meta"):
        built = model.build(model.config)
    assert sum({id(p): p.numel() for p in built.parameters()}.values()) == parameters


def test_nothing_of_the_files_folder_runs(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    written(tmp_path, "qwen3", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    predict_hf(hf_model(tmp_path), HfStep(16, 1), [H100], tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"model_type": "never_heard_of"}, "not known to transformers"),
        ({"model_type": ["qwen3"]}, "not known to transformers"),
        (SMALL | {"model_type": "qwen3", "hidden_size": "wide"}, "hidden_size"),
        (SMALL | {"model_type": "bert", "hidden_size": 65}, "cannot train a model"),
    ],
)
def test_what_transformers_cannot_use_is_one_line(
    data: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=said) as error:
        predict_hf(hf_model(tmp_path), HfStep(16, 1), [H100], tmp_path)
    assert "\n" not in str(error.value)


def test_the_command_line_says_whose_step_it_is(shared: Project, tmp_path: Path) -> None:
    words = ("predict", "--hf", str(written(tmp_path, "qwen3")))
    code, out, _ = shared.lsai(*words, "--gpu", "h100", "--set", "seq_len=64", "--json")
    found = json.loads(out)
    assert code == 0 and found["step"]["seq_len"] == 64 and len(found["gpus"]) == 1
    assert any("that of transformers" in remark for remark in found["remarks"])
    code, out, _ = shared.lsai(*words, "--gpu", "0.7GiB", "--set", "seq_len=128")
    assert code == 0 and "the step is that of transformers" in out and "128 tokens" in out
    for more, said in (
        (("--set", "optim.lr=0.1"), "optim.lr is a setting of"),
        (("--set", "precision=tf32"), "has bf16, bf16_autocast, fp32"),
        (("--gpus", "2"), "predicted for one GPU"),
        (("--as", "torchtitan"), "no other --as than hf"),
        (("--batch-size", "1", "--set", "grad_accum=0"), "grad_accum: expected a number"),
    ):
        code, _, err = shared.lsai(*words, *more)
        assert code == 2 and said in err and len(err.splitlines()) == 1, err


def test_without_transformers_one_line_says_what_to_install(
    shared: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = shared.lsai("predict", "--hf", str(written(tmp_path, "qwen3")), "--gpu", "h100")
    assert code == 2 and "pip install transformers" in err and len(err.splitlines()) == 1
