"""A config.json of Hugging Face: served where the model is a Llama, else refused for a true
reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import Project

from lsai_core.base.errors import UserError
from lsai_core.model.hf import load_hf
from lsai_core.model.hf_config import FAMILIES, OTHERS, describe, read_config
from lsai_core.model.transformer import count_parameters

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "rms_norm_eps": 1e-5,
}
SMALL: dict[str, Any] = LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def written(folder: Path, data: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(data))
    return folder


# Published shapes of the four families, and their numbers of parameters.
PUBLISHED = {
    "Llama 3.1 8B": (
        LLAMA | {"rope_scaling": LLAMA3, "max_position_embeddings": 131_072},
        8_030_261_248,
    ),
    "Llama 3.2 1B": (
        LLAMA
        | {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "tie_word_embeddings": True,
        },
        1_235_814_400,
    ),
    "TinyLlama": (
        LLAMA
        | {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "vocab_size": 32_000,
        }
        | {"num_key_value_heads": 4},
        1_100_048_384,
    ),
    "Mistral 7B": (
        LLAMA | {"model_type": "mistral", "vocab_size": 32_000, "sliding_window": 4096},
        7_241_732_096,
    ),
    "Phi-3 mini": (
        LLAMA
        | {
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_key_value_heads": 32,
        }
        | {"vocab_size": 32_064, "sliding_window": 2047},
        3_821_079_552,
    ),
    "SmolLM3": (
        LLAMA
        | {
            "model_type": "smollm3",
            "hidden_size": 2048,
            "intermediate_size": 11_008,
            "num_hidden_layers": 36,
        }
        | {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True},
        3_075_098_624,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_their_parameters(name: str, tmp_path: Path) -> None:
    data, parameters = PUBLISHED[name]
    assert count_parameters(describe(written(tmp_path, data)).model).total == parameters
    assert describe(tmp_path / "config.json") == describe(tmp_path), "the file or its folder"


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_have_the_parameters_that_transformers_gives_them(
    kind: str, tmp_path: Path
) -> None:
    """Also of keys that a file leaves out."""
    for left_out in ((), ("num_key_value_heads",)):
        data = {key: value for key, value in SMALL.items() if key not in left_out} | {
            "model_type": kind,
            "pad_token_id": 0,
        }
        if "num_key_value_heads" in left_out and kind == "mistral":
            data |= {"num_attention_heads": 16, "hidden_size": 64}
        theirs = transformers.AutoConfig.for_model(**data)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(theirs)
        parameters = {id(p): p.numel() for p in model.parameters()}
        assert count_parameters(describe(written(tmp_path, data)).model).total == sum(
            parameters.values()
        )


def test_windows_are_those_of_transformers(tmp_path: Path) -> None:
    assert describe(written(tmp_path, SMALL | {"model_type": "mistral"})).window == 4096
    assert (
        describe(
            written(tmp_path, SMALL | {"model_type": "mistral", "sliding_window": None})
        ).window
        is None
    )
    assert (
        describe(written(tmp_path, SMALL | {"model_type": "phi3", "sliding_window": 2047})).window
        == 2047
    )
    assert (
        describe(written(tmp_path, SMALL | {"model_type": "llama", "sliding_window": 7})).window
        is None
    )
    for wrong in (0, -1, "x", 2.5, [4], True):
        with pytest.raises(UserError, match="sliding_window"):
            describe(written(tmp_path, SMALL | {"model_type": "mistral", "sliding_window": wrong}))


DIFFERS = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 8.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
    "longrope": {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
    "quantization_config": {
        "quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}
    },
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("word", DIFFERS)
def test_what_changes_no_memory_is_told_and_keeps_weights_from_being_read(
    word: str, tmp_path: Path
) -> None:
    found = describe(written(tmp_path, SMALL | DIFFERS[word]))
    assert len(found.differs) == 1 and word in found.differs[0]
    assert found.model.model_dump(exclude={"rope_theta"}) == describe(
        written(tmp_path, SMALL)
    ).model.model_dump(exclude={"rope_theta"})
    written(tmp_path, SMALL | DIFFERS[word])
    with pytest.raises(UserError, match=word):
        read_config(tmp_path)


ANOTHER = {
    "qwen2": "biases",
    "qwen3": "normalizes queries and keys",
    "gemma2": "GELU",
    "gemma3_text": "GELU",
    "olmo2": "norms follow",
    "gpt2": "learned positions",
    "gpt_neox": "LayerNorm",
    "mixtral": "mixture of experts",
    "qwen3_moe": "mixture of experts",
    "deepseek_v3": "mixture of experts",
    "mamba": "no attention",
    "t5": "no decoder",
    "never_heard_of": "not known",
}


@pytest.mark.parametrize("kind", ANOTHER)
def test_another_model_is_refused_for_a_true_reason(kind: str, tmp_path: Path) -> None:
    for data in (SMALL | {"model_type": kind}, {"model_type": kind}):
        with pytest.raises(UserError, match="model_type") as error:
            describe(written(tmp_path, data))
        assert ANOTHER[kind] in str(error.value) and "\n" not in str(error.value)


def test_reasons_are_given_of_models_that_exist() -> None:
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    assert [kind for kind in (*OTHERS, *FAMILIES) if kind not in known] == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "biases": ({"attention_bias": True}, "attention_bias"),
    "MLP biases": ({"mlp_bias": True}, "mlp_bias"),
    "GELU": ({"hidden_act": "gelu"}, "hidden_act"),
    "wide heads": ({"head_dim": 128}, "head_dim 128 is not hidden_size / heads"),
    "dropout": ({"resid_pdrop": 0.1}, "resid_pdrop"),
    "both ropes": (
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
        "contradict",
    ),
    "both thetas": (
        {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_theta": 1e5}},
        "contradict",
    ),
    "rope is text": ({"rope_parameters": "llama3"}, "no mapping"),
    "rope is a list": ({"rope_scaling": [1]}, "no mapping"),
    "rope has no name": ({"rope_scaling": {"type": 3}}, "rope_type"),
    "llama3 without its factors": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "lacks low_freq_factor",
    ),
    "llama3 of text": ({"rope_scaling": LLAMA3 | {"factor": "8"}}, "factor"),
    "no length": ({"max_position_embeddings": "abc"}, "max_position_embeddings"),
    "experts": ({"num_local_experts": 8}, "mixture of experts"),
    "no name": ({"model_type": None}, "missing key model_type"),
    "name is a list": ({"model_type": ["llama"]}, "missing key model_type"),
    "layers": ({"num_hidden_layers": True}, "n_layers"),
    "width": ({"hidden_size": 4096.0}, "d_model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_its_key(name: str, tmp_path: Path) -> None:
    changes, said = REFUSED[name]
    with pytest.raises(UserError) as error:
        describe(written(tmp_path, SMALL | changes))
    assert said in str(error.value) and "\n" not in str(error.value)


ROPES: dict[str, dict[str, Any]] = {
    "original in the mapping": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32}},
    "original is the context length": {"rope_scaling": LLAMA3},
    "original beside the mapping": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
    "beside and in it": {
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32},
        "original_max_position_embeddings": 64,
    },
    "all in one mapping": {"rope_parameters": LLAMA3 | {"rope_theta": 5e4}},
    "the same mapping twice": {"rope_parameters": dict(LLAMA3), "rope_scaling": dict(LLAMA3)},
    "theta beside": {"rope_scaling": LLAMA3, "rope_theta": 5e5},
    "theta twice": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 3e4},
        "rope_theta": 5e5,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_logits_of_every_way_to_say_rotary_embeddings_are_those_of_transformers(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    for parameter in reference.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    reference.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    plain = {key: value for key, value in said.items() if not key.startswith("rope")}
    written(tmp_path, plain | json.loads(json.dumps(ROPES[name])))
    tokens_BS = torch.randint(0, 101, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path, attn_implementation="eager"
        )(tokens_BS).logits
        found = load_hf(tmp_path)(tokens_BS)
    assert float((found - expected).norm() / expected.norm()) <= 1e-5


def test_the_command_line_takes_a_file_and_tells_what_is_left_out(
    shared: Project, tmp_path: Path
) -> None:
    data = SMALL | {"model_type": "mistral", "sliding_window": 64, "vocab_size": 512}
    data["quantization_config"] = {"bits": 4}
    (tmp_path / "tiny.json").write_bytes(json.dumps(data).encode("utf-8-sig"))
    words = [
        "predict",
        "--hf",
        str(tmp_path / "tiny.json"),
        "--gpu",
        "l40s",
        "--set",
        "seq_len=128",
    ]
    code, out, _ = shared.lsai(*words)
    assert (
        code == 0
        and "Note: quantization_config is left out" in out
        and "looks back 64 positions" in out
    )
    code, out, err = shared.lsai("predict", "--hf", str(tmp_path / "nothing"), "--gpu", "l40s")
    assert code == 2 and not out and "no such file" in err and len(err.splitlines()) == 1
