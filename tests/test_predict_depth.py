"""A deep model's memory from two shallow ones: to the byte what the model needs that is run at its depth."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lsai_core.config import TrainConfig
from lsai_core.profiling.predict import depth
from lsai_core.profiling.predict.depth import Segment, Segments, at_any_depth
from lsai_core.profiling.predict.simulate import simulate
from lsai_core.strict import validated

DEEP = {"n_layers": 14, "d_model": 256, "n_heads": 4, "n_kv_heads": 2, "d_ff": 512, "vocab_size": 512}


@pytest.mark.parametrize("on", ["gpu", "cpu"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": "full", "blocks": "plain", "precision": "bf16_autocast", "grad_accum": 3},
        {"compile": True, "optim": {"states": "8bit"}},
        {"attention": {"backend": "eager"}, "precision": "fp32"},
        {"grad_checkpoint": "selective"},
        {"grad_checkpoint": "alternating", "model": DEEP | {"n_layers": 21}, "compile": True},
        {"grad_checkpoint": "full", "compile": True, "parallel": {"cpu_offload": True}},
        {"fp8": {"recipe": "tensorwise"}, "compile": True},
        {"parallel": {"fsdp": 4}, "precision": "bf16_autocast", "compile": True},
        {"parallel": {"fsdp": 2, "reshard_after_forward": False}},
        {"grad_checkpoint": "attention", "saved_inputs": "host", "inputs_on_gpu": 1},
        {"parallel": {"cp": 2}, "grad_checkpoint": "full", "saved_inputs": "host", "mlp_chunk": 64},
    ],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_two_shallow_runs_tell_the_deep_one(changes: dict[str, Any], on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"model": DEEP, "precision": "bf16", "data": {"vocab_size": 400}, "seq_len": 256, "batch_size": 2}
    config = validated(TrainConfig, base | changes, "test")
    depths: list[int] = []

    def counted(run: Any, n_layers: int, **options: Any) -> Segments:
        def noted(layers: int) -> Segments:
            depths.append(layers)
            return run(layers)

        return at_any_depth(noted, n_layers, **options)

    monkeypatch.setattr("lsai_core.profiling.predict.simulate.at_any_depth", counted)
    told = simulate(config, on=on)
    layers = config.model.n_layers
    assert len(depths) == 2 and max(depths) <= (6 if layers == DEEP["n_layers"] else 11)
    monkeypatch.setattr(depth, "ENDS", 100)
    assert told == simulate(config, on=on) and depths[2:] == [layers]


def step(levels: dict[int, int]) -> Segments:
    found = {Segment("forward", 0, "into", block): Counter(activations=level) for block, level in levels.items()}
    return {**found, Segment("optimizer", 0): Counter(weights=10 * len(levels))}


def test_a_line_is_continued_from_both_ends() -> None:
    def run(n_layers: int) -> Segments:
        return step(
            {block: 7 + 3 * block + n_layers + (50 if block == n_layers - 1 else 0) for block in range(n_layers)}
        )

    told, whole = at_any_depth(run, 40), run(40)
    assert (
        told[Segment("forward", 0, "into", -1)] == whole[Segment("forward", 0, "into", 39)] == Counter(activations=214)
    )
    assert told[Segment("forward", 0, "into", 0)] == whole[Segment("forward", 0, "into", 0)]
    assert told[Segment("optimizer", 0)] == whole[Segment("optimizer", 0)] == Counter(weights=400)


def test_what_is_no_line_is_run_at_its_depth() -> None:
    def run(n_layers: int) -> Segments:
        return step({block: block**2 for block in range(n_layers)})

    assert at_any_depth(run, 40) == run(40)
