"""Peers do the work of our trainer: the same initial weights, windows and optimizer at each step,
so that in fp32 every loss is the same up to the order of sums."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_MODEL, write_run

from lsai_core.base.files import read_jsonl
from lsai_core.config.model import ModelConfig
from lsai_core.config.strict import validated
from lsai_core.config.train import TrainConfig
from lsai_core.model.hf import config_json
from lsai_core.model.transformer import build_model, initial_values
from lsai_core.training.loop import train
from lsai_lab.data import Dataset
from lsai_lab.machine.environment import package_version
from lsai_lab.peers import titan, titan3
from lsai_lab.peers.config import PeerConfig
from lsai_lab.peers.run import run
from lsai_lab.peers.start import start_as_ours
from lsai_lab.runs.kinds import Context

MODEL = {**TINY_MODEL, "n_heads": 4, "n_kv_heads": 2}
TITAN = package_version("torchtitan") or "none"
needs_titan = pytest.mark.skipif(
    not TITAN.startswith("0.2."), reason=f"needs torchtitan 0.2, not {TITAN}"
)
needs_hf = pytest.mark.skipif(
    package_version("accelerate") is None, reason="the Hugging Face Trainer needs accelerate"
)
# Every part of the recipe does something: warm-up, the cosine to its end, clipping, weight decay.
OPTIM = {"lr": 1e-2, "warmup_steps": 4, "grad_clip": 0.5, "weight_decay": 0.5}
STUDY = {"model": MODEL, "device": "cpu", "precision": "fp32", "seq_len": 32, "batch_size": 4}
STUDY |= {"steps": 20, "optim": OPTIM, "seed": 3}


@pytest.fixture
def sharp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights eight times as large, so that attention depends on positions and on what it sees."""

    def larger(config: ModelConfig, name: str, *given: Any) -> torch.Tensor:
        return initial_values(config, name, *given) * (1 if "norm" in name else 8)

    for module in ("lsai_core.model.transformer", "lsai_lab.peers.start"):
        monkeypatch.setattr(f"{module}.initial_values", larger)


def hf_model(config: ModelConfig, dtype: torch.dtype) -> Any:
    transformers = pytest.importorskip("transformers")
    shape = transformers.LlamaConfig(**config_json(config, dtype, 64))
    model = transformers.AutoModelForCausalLM.from_config(shape, dtype=dtype)
    start_as_ours(model, config, 7, torch.device("cpu"))
    return model


def titan_model(config: ModelConfig) -> tuple[Any, Any]:
    """torchtitan's, and its adapter from Hugging Face's tensors."""
    from torchtitan.models.llama3 import Llama3StateDictAdapter, Transformer

    shape = titan.flavor(config)
    shape.max_seq_len = 64
    return Transformer(shape), Llama3StateDictAdapter(shape, None)


def tokens() -> torch.Tensor:
    return torch.randint(0, MODEL["vocab_size"], (2, 40), generator=torch.manual_seed(0))


def our_logits(config: ModelConfig) -> torch.Tensor:
    logits: torch.Tensor = build_model(config, seed=7)(tokens()).detach()
    return logits


SHAPES: list[dict[str, Any]] = [
    {},
    {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 16}},
    {"tie_embeddings": True},
]


@pytest.mark.skipif(not TITAN.startswith("0.3."), reason=f"needs torchtitan 0.3, not {TITAN}")
@pytest.mark.usefixtures("sharp")
@pytest.mark.parametrize("changes", SHAPES[:2], ids=["plain", "scaled"])
def test_the_model_of_torchtitan_0_3_starts_as_ours(changes):
    config = ModelConfig.model_validate({**MODEL, **changes})
    model, renamed = titan3.shape(config, 64).build(), partial(titan3.renamed, config)
    start_as_ours(model, config, 7, torch.device("cpu"), renamed)
    torch.testing.assert_close(model(tokens()), our_logits(config), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("sharp")
@pytest.mark.parametrize("changes", SHAPES, ids=["plain", "scaled", "tied"])
def test_the_hugging_face_model_starts_as_ours(changes):
    config = ModelConfig.model_validate({**MODEL, **changes})
    logits_BSV = hf_model(config, torch.float32)(tokens()).logits
    torch.testing.assert_close(logits_BSV, our_logits(config), rtol=0, atol=1e-5)


@needs_titan
@pytest.mark.usefixtures("sharp")
@pytest.mark.parametrize("changes", SHAPES[:2], ids=["plain", "scaled"])
def test_torchtitan_s_model_starts_as_ours(changes):
    config = ModelConfig.model_validate({**MODEL, **changes})
    model, adapter = titan_model(config)
    start_as_ours(model, config, 7, torch.device("cpu"), adapter.from_hf)
    torch.testing.assert_close(model(tokens()), our_logits(config), rtol=0, atol=1e-5)
    # Rows of q and k in our order would be another function.
    adapter._reverse_permute = lambda weight, *_: weight
    start_as_ours(model, config, 7, torch.device("cpu"), adapter.from_hf)
    assert float((model(tokens()).detach() - our_logits(config)).abs().max()) > 0.01


def test_weights_in_bf16_are_rounded_as_ours():
    config = ModelConfig.model_validate(MODEL)
    own = build_model(config, dtype=torch.bfloat16, seed=7)
    theirs = hf_model(config, torch.bfloat16).model.layers[1]
    q_BD, k_BD, v_BD = (
        getattr(theirs.self_attn, f"{name}_proj").weight for name in ("q", "k", "v")
    )
    assert torch.equal(torch.cat([q_BD, k_BD, v_BD]), own.blocks[1].attention.qkv.weight)
    assert torch.equal(theirs.mlp.down_proj.weight, own.blocks[1].mlp.down.weight)


def test_a_model_of_other_names_is_refused():
    with pytest.raises(RuntimeError, match=r"no parameter model\.embed_tokens\.weight"):
        start_as_ours(
            torch.nn.Linear(2, 2), ModelConfig.model_validate(MODEL), 0, torch.device("cpu")
        )


def our_losses(tmp_path: Path, dataset: Dataset, **changes: Any) -> list[float]:
    config = validated(TrainConfig, {**STUDY, "data": {"vocab_size": 320}, **changes}, "test")
    train(config, dataset, tmp_path / "ours")
    return [row["loss"] for row in read_jsonl(tmp_path / "ours" / "metrics.jsonl")]


def peer_losses(
    tmp_path: Path, corpus: Path, ceilings: dict[str, Any], framework: str, **changes: Any
) -> list[float]:
    write_run(tmp_path, "machine", "machine", "ceilings", kind="ceilings", results=ceilings)
    folder = tmp_path / "peers" / "run"
    folder.mkdir(parents=True)
    study = {**STUDY, "data": {"source": f"file:{corpus}", "vocab_size": 320}, **changes}
    given = PeerConfig.from_study(study | {"peer": {"framework": framework}}, {})
    config = validated(PeerConfig, given, "test")
    results = run(config, Context(folder, tmp_path / "data", tmp_path))
    assert results["tokens"] == STUDY["steps"] * config.tokens_per_step
    return [row["loss"] for row in read_jsonl(folder / "metrics.jsonl")]


def assert_same(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected) == STUDY["steps"] and expected[0] - expected[-1] > 0.5
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert abs(one - other) < 2e-5 * (step + 1), (step, one, other)


@needs_hf
@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"grad_checkpoint": "full"}], ids=["plain", "kept less"])
def test_the_hugging_face_trainer_has_our_losses(tmp_path, corpus, dataset, ceilings, changes):
    found = peer_losses(tmp_path, corpus, ceilings, "hf", **changes)
    assert_same(found, our_losses(tmp_path, dataset))


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compiled": {"compile": True, "grad_checkpoint": "full"},
    "sharded": {"parallel": {"fsdp": 2}, "batch_size": 2},
    "matrices": {"parallel": {"tp": 2}, "grad_checkpoint": "full"},
}


@needs_titan
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchtitan_has_our_losses(tmp_path, corpus, dataset, ceilings, layout, titan_on_cpu):
    found = peer_losses(tmp_path, corpus, ceilings, "torchtitan", **LAYOUTS[layout])
    assert_same(found, our_losses(tmp_path, dataset))
