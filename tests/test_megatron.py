"""Megatron-Core as a peer: what it is refused and given, and that its model is ours."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import test_peers
import torch
from conftest import CHECKOUT, TINY_MODEL

from lsai_core.base.errors import Unavailable, UserError
from lsai_core.config.model import ModelConfig
from lsai_core.config.strict import validated
from lsai_core.model.hf import slots
from lsai_core.model.transformer import build_model
from lsai_lab.analysis.peers import published_speeds
from lsai_lab.machine.environment import package_version
from lsai_lab.peers import megatron
from lsai_lab.peers.config import PeerConfig, needed_packages
from lsai_lab.peers.megatron_weights import fill, names, packed
from lsai_lab.peers.run import adapter, run
from lsai_lab.runs.kinds import Context
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import resolve

SMALL = {**test_peers.SMALL, "compile": True, "data": {"vocab_size": 320}}


def megatron_config(peer: dict[str, Any] | None = None, **changes: Any) -> PeerConfig:
    study = {**SMALL, "peer": {"framework": "megatron", **(peer or {})}, **changes}
    return validated(PeerConfig, PeerConfig.from_study(study, {}), "test")


REFUSED = {
    "rowwise": ({}, {"fp8": {"recipe": "rowwise"}}, "tensorwise .* or delayed"),
    "compiled": ({"compile": True}, {}, "no compile"),
    "liger": ({"liger": True}, {}, "no liger"),
    "attention": ({"attention": "flash_attention_2"}, {}, "attention: sdpa"),
    "copies": ({}, {"parallel": {"fsdp": 2, "replicate": 2}}, "parallel.fsdp processes"),
    "pipeline": ({}, {"parallel": {"pp": 2}}, "pp"),
    "bf16 states of several": ({}, {"parallel": {"tp": 2}}, "bf16_autocast"),
    "short": ({"cuda_graph": True}, {"steps": 3}, "after 3 steps"),
    "8-bit states": ({}, {"optim": {"states": "8bit"}}, "AdamW"),
    "graph": ({"framework": "torchtitan"}, {"peer_graph": True}, "Megatron-Core's alone"),
    "delayed": ({"framework": "hf", "fp8": "delayed"}, {}, "delayed"),
    "delayed scales": ({"framework": "torchtitan", "fp8": "delayed"}, {}, "current scales"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_one_line(name):
    peer, changes, words = REFUSED[name]
    changes = dict(changes)
    if changes.pop("peer_graph", False):
        peer = {**peer, "cuda_graph": True}
    with pytest.raises(UserError, match=words) as error:
        megatron_config(peer, **changes)
    assert "\n" not in str(error.value)


def test_it_takes_the_work_of_the_study_and_names_its_packages():
    config = megatron_config(fp8={"recipe": "tensorwise"})
    assert (config.fp8, config.compile, config.needs_gpu) == ("tensorwise", False, True)
    assert set(config.packages) == {"megatron-core", "transformer-engine"}
    assert needed_packages(config.model_dump()) == list(config.packages)
    assert adapter(config, None) == "lsai_lab.peers.megatron"
    shared = megatron_config(precision="bf16_autocast", parallel={"fsdp": 2, "tp": 2})
    assert shared.tokens_per_step == 2 * 2 * 32, "processes that share matrices read the same"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_is_unavailable(tmp_path):
    folder = tmp_path / "peers" / "run"
    folder.mkdir(parents=True)
    with pytest.raises(Unavailable, match="GPU"):
        run(megatron_config(), Context(folder, tmp_path / "data", tmp_path))


def test_the_command_line_and_the_options_are_those_of_its_guides(tmp_path, dataset):
    words, variables = megatron.start(megatron_config(), dataset, tmp_path)
    assert "torch.distributed.run" in words and words[-1] == "lsai_lab.peers.worker"
    assert variables == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    graph = megatron_config({"cuda_graph": True})
    assert megatron.start(graph, dataset, tmp_path)[1] == {}, "a graph's memory does not move"
    assert megatron.options(graph)["cuda_graph_impl"] == "full_iteration"

    several = megatron_config(
        {"fp8": "delayed"}, precision="bf16_autocast", parallel={"fsdp": 2, "tp": 2}
    )
    words, variables = megatron.start(several, dataset, tmp_path)
    assert any("4" in word for word in words)
    assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    given = megatron.options(several)
    assert given["fp8_param"] and given["sequence_parallel"]
    assert (given["fp8_recipe"], given["tensor_model_parallel_size"]) == ("delayed", 2)
    assert "fp8" not in megatron.options(megatron_config())
    shown = megatron.tuning(several, True)
    assert "fp8_recipe=delayed" in shown and "activation_func=silu" in shown and "<" not in shown


def test_every_weight_has_a_place_and_heads_are_ordered_by_group():
    config = megatron_config().model
    for name in slots(config):
        assert names(name), name
    size, heads, groups = config.head_dim, config.n_heads, config.n_kv_heads
    assert heads > groups, "grouped, or the order says nothing"
    rows = torch.arange((heads + 2 * groups) * size)[:, None]
    query, key, value = rows.split([heads * size, groups * size, groups * size])
    each = heads // groups * size
    for at, group in enumerate(packed([query, key, value], groups).chunk(groups)):
        assert torch.equal(group[:each], query[at * each : (at + 1) * each])
        assert torch.equal(group[each : each + size], key[at * size : (at + 1) * size])
        assert torch.equal(group[each + size :], value[at * size : (at + 1) * size])


class Parts(torch.nn.Module):
    """Parameters of one layer as Megatron has them, shared by `tp` processes."""

    def __init__(self, config: ModelConfig, tp: int) -> None:
        super().__init__()
        d, rows = config.d_model, config.n_heads + 2 * config.n_kv_heads
        shapes = {
            "embedding.word_embeddings.weight": (0, config.vocab_size, d),
            "output_layer.weight": (0, config.vocab_size, d),
            "decoder.final_layernorm.weight": (None, d),
        }
        for i in range(config.n_layers):
            layer = f"decoder.layers.{i}."
            shapes |= {
                f"{layer}self_attention.linear_qkv.layer_norm_weight": (None, d),
                f"{layer}self_attention.linear_qkv.weight": (0, rows * config.head_dim, d),
                f"{layer}self_attention.linear_proj.weight": (1, d, d),
                f"{layer}mlp.linear_fc1.layer_norm_weight": (None, d),
                f"{layer}mlp.linear_fc1.weight": (0, 2 * config.d_ff, d),
                f"{layer}mlp.linear_fc2.weight": (1, d, config.d_ff),
            }
        self.own = {}
        for name, (dim, *shape) in shapes.items():
            if dim is not None:
                shape[dim] //= tp
            self.own[name] = torch.nn.Parameter(torch.full(shape, torch.nan))
            if dim is not None:
                self.own[name].tensor_model_parallel = True
                self.own[name].partition_dim = dim

    def named_parameters(self, *_args, **_kwargs):
        yield from self.own.items()


def test_parts_of_two_processes_are_the_matrices_of_one():
    config = megatron_config(model={**TINY_MODEL, "n_kv_heads": 2}).model
    (whole,), halves = [Parts(config, 1)], [Parts(config, 2), Parts(config, 2)]
    fill(whole, config, 0, torch.device("cpu"))
    for rank, half in enumerate(halves):
        fill(half, config, 0, torch.device("cpu"), rank, 2)
    for name, parameter in whole.own.items():
        first, second = (half.own[name].detach() for half in halves)
        if name.endswith("linear_fc1.weight"):  # gate above up in each
            gates, ups = zip(first.chunk(2), second.chunk(2), strict=True)
            expected = torch.cat([*gates, *ups])
        elif parameter.ndim == 1:
            assert torch.equal(first, second)
            expected = first
        else:
            expected = torch.cat([first, second], parameter.partition_dim)
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=0, msg=name)


MEGATRON = package_version("megatron-core")


@pytest.mark.skipif(MEGATRON is None, reason="needs megatron-core")
@pytest.mark.skipif(torch.cuda.is_available(), reason="reads its CPU way")
@pytest.mark.parametrize("tied", [False, True])
def test_its_model_is_the_function_that_ours_is(tmp_path, monkeypatch, tied):
    """With Megatron's own layers, on a CPU: loss and gradients."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(CudaRNGStatesTracker, "fork", lambda self: nullcontext())
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        config = megatron_config(model={**TINY_MODEL, "tie_embeddings": tied})
        own = {"apply_rope_fusion": False, "cross_entropy_loss_fusion": False}
        plain = {"bias_activation_fusion": False, "bias_dropout_fusion": False}
        cpu = {"use_cpu_initialization": True, "bf16": False, "params_dtype": torch.float32}
        layer = get_gpt_layer_local_spec(normalization="RMSNorm")
        theirs = megatron.build(config, layer, **own, **plain, **cpu)
        ours = build_model(config.model, seed=3)
        fill(theirs, config.model, 3, torch.device("cpu"))
        tokens = torch.randint(0, 320, (2, 33), generator=torch.Generator().manual_seed(0))
        x_BS, y_BS = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        hidden_SS = torch.ones(32, 32, dtype=torch.bool).triu(1)[None, None]
        at_BS = torch.arange(32).expand(2, 32)
        loss = theirs(x_BS, at_BS, hidden_SS, labels=y_BS).mean()
        loss.backward()
        expected = torch.nn.functional.cross_entropy(ours(x_BS).flatten(0, 1), y_BS.flatten())
        expected.backward()
        torch.testing.assert_close(loss, expected)
        gradients = {name: weight.grad for name, weight in ours.named_parameters()}
        found = {name: weight.grad for name, weight in theirs.named_parameters()}
        for name, own in {
            "embedding.word_embeddings": "embedding",
            "decoder.layers.1.self_attention.linear_proj": "blocks.1.attention.output",
            "decoder.layers.0.input_layernorm": "blocks.0.attention_norm",
            "decoder.layers.0.mlp.linear_fc1": "blocks.0.mlp.gate_up",
        }.items():
            gradient = gradients[f"{own}.weight"]
            torch.testing.assert_close(found[f"{name}.weight"], gradient, rtol=1e-4, atol=1e-6)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def test_the_study_plans_it_beside_ours_at_the_same_work():
    study = Session("h100", root=CHECKOUT).study("peers")
    ours = resolve(study, "ours_bf16", "ours", 0, {})
    wanted = {"bf16": "none", "fp8_delayed": "delayed", "fp8_current": "tensorwise"}
    for name, fp8 in wanted.items():
        for graph in (False, True):
            variant = f"megatron_{name}" + ("_graph" if graph else "")
            config = resolve(study, variant, "megatron", 0, {})
            assert isinstance(config, PeerConfig)
            assert (config.framework, config.fp8, config.cuda_graph) == ("megatron", fp8, graph)
            assert config.tokens_per_step == ours.seq_len * ours.batch_size
            assert config.optim.lr == ours.optim.lr and config.steps == ours.steps


def test_on_several_gpus_it_stands_beside_ours_with_fp32_states():
    study = Session("h100x4", root=CHECKOUT).study("sharing")
    for variant in ("fsdp_4", "tp_4"):
        ours = resolve(study, variant, "wide", 0, {})
        config = resolve(study, f"megatron_{variant}", "megatron", 0, {})
        assert config.precision == ours.precision == "bf16_autocast"
        assert (config.parallel, config.grad_checkpoint) == (ours.parallel, ours.grad_checkpoint)
        assert config.tokens_per_step == ours.tokens_per_step == 4 * 4096
        assert config.parallel.world_size == 4


def test_published_speeds_say_who_what_when_and_where():
    found = published_speeds(CHECKOUT)
    assert found.iloc[0]["project"] == "Megatron-Bridge 25.11"
    assert found.iloc[0][["tokens", "tflops"]].tolist() == [14451, 744]
    assert found["date"].str.fullmatch(r"20\d\d-\d\d").all()
    assert found["url"].str.startswith("https://").all() and found["what"].str.len().min() > 10
    assert found[["tokens", "tflops"]].notna().any(axis=1).all()
