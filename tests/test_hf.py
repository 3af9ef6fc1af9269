"""Checkpoints against transformers' own Llama: the same logits and gradients, both ways, and clear
errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lsai_core.base.errors import UserError
from lsai_core.config.model import ModelConfig
from lsai_core.model.hf import load_hf, read_config, save_hf, slots
from lsai_core.model.transformer import build_model

SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"num_key_value_heads": 2, "rope_theta": 500_000.0},
    "mqa-tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama3-scaling": {"num_key_value_heads": 2, "rope_theta": 5e5, "rope_scaling": LLAMA3},
}
TOKENS = torch.randint(0, 101, (2, 77), generator=torch.Generator().manual_seed(0))


def theirs(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings: dict[str, Any] = {**SHAPE, **changes, "attn_implementation": "eager"}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():  # norms of one and tiny weights would hide mistakes
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def relative(value: Tensor, expected: Tensor | None) -> float:
    assert expected is not None
    value, expected = value.detach().double(), expected.detach().double()
    return float((value - expected).norm() / expected.norm())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    theirs().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_transformers(variant: str, tmp_path: Path) -> None:
    reference = theirs(**VARIANTS[variant])
    reference.save_pretrained(tmp_path)
    ours = load_hf(tmp_path)
    expected, logits = reference(TOKENS).logits, ours(TOKENS)
    assert relative(logits, expected) <= 1e-5
    for output in (expected, logits):
        torch.nn.functional.cross_entropy(
            output[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()
        ).backward()
    wanted, found = dict(reference.named_parameters()), dict(ours.named_parameters())
    for name, slot in slots(ours.config).items():
        gradient = found[slot.name].grad
        assert gradient is not None
        assert relative(gradient[slot.start : slot.stop], wanted[name].grad) <= 1e-5, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_reads_what_is_saved(variant: str, tmp_path: Path) -> None:
    theirs(**VARIANTS[variant]).save_pretrained(tmp_path / "in")
    ours = load_hf(tmp_path / "in")
    save_hf(ours, tmp_path / "out", max_seq_len=128)
    reference = LlamaForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert relative(ours(TOKENS), reference(TOKENS).logits) <= 1e-5
    assert reference.config.max_position_embeddings == 128
    again = load_hf(tmp_path / "out")
    assert again.config == ours.config and torch.equal(again(TOKENS), ours(TOKENS))


def test_sharded_checkpoint(tmp_path: Path) -> None:
    reference = theirs()
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert relative(load_hf(tmp_path)(TOKENS), reference(TOKENS).logits) <= 1e-5
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(UserError, match=victim.name):
        load_hf(tmp_path)


def test_a_head_that_differs_from_the_table_it_is_said_to_share_is_refused(tmp_path: Path) -> None:
    theirs(tie_word_embeddings=False).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(UserError, match=r"lm_head\.weight differs"):
        load_hf(tmp_path)


def test_saving_over_a_sharded_checkpoint_leaves_one_model(tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "tokenizer.json").write_text("{}")
    shape = {
        "n_layers": 1,
        "d_model": 32,
        "n_heads": 2,
        "n_kv_heads": 2,
        "d_ff": 64,
        "vocab_size": 101,
    }
    model = build_model(ModelConfig.model_validate(shape))
    save_hf(model, tmp_path)
    assert torch.equal(load_hf(tmp_path)(TOKENS), model(TOKENS))
    assert (tmp_path / "tokenizer.json").exists()
    assert not list(tmp_path.glob(".*"))


def test_dtype_and_bf16_round_trip(saved: Path, tmp_path: Path) -> None:
    model = load_hf(saved, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    save_hf(model, tmp_path / "bf16")
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert torch.equal(load_hf(tmp_path / "bf16", dtype=torch.bfloat16)(TOKENS), model(TOKENS))


def test_interrupted_save_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    theirs().save_pretrained(tmp_path)
    model = load_hf(tmp_path)
    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_hf(model, tmp_path)
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(UserError, match=r"config\.json"):
        load_hf(tmp_path)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"head_dim": 32}, "head_dim"),
        ({"num_key_value_heads": 3}, "n_kv_heads=3"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "yarn"),
        ({"intermediate_size": 180}, "mlp.*_proj.weight.*shape"),
        ({"num_hidden_layers": 4}, r"missing tensors model\.layers\.3.* and 6 more"),
        ({"num_hidden_layers": 2}, r"model\.layers\.2.*has no place"),
    ],
)
def test_config_that_does_not_fit_is_refused(
    saved: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(saved, **changes)
    with pytest.raises(UserError, match=message):
        load_hf(saved)


def test_missing_and_damaged_files_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file: .*config\.json"):
        load_hf(tmp_path / "nowhere")
    weights = saved / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights)
    with pytest.raises(UserError, match=r"missing tensors model\.layers\.1\.mlp\.up_proj\.weight"):
        load_hf(saved)
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(UserError, match=r"model\.safetensors: not a readable"):
        load_hf(saved)
    weights.unlink()
    with pytest.raises(UserError, match="neither"):
        load_hf(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        read_config(saved)


def test_config_of_older_transformers_is_read(saved: Path) -> None:
    """Before transformers 5, rope_theta and rope_scaling were keys of their own."""
    path = saved / "config.json"
    data = json.loads(path.read_text())
    data.pop("rope_parameters")
    scaling = {"type" if key == "rope_type" else key: value for key, value in LLAMA3.items()}
    path.write_text(json.dumps({**data, "rope_theta": 5e5, "rope_scaling": scaling}))
    config = read_config(saved)
    assert config.rope_theta == 5e5
    assert config.rope_scaling is not None and config.rope_scaling.factor == 8.0
