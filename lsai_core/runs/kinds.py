"""The kinds of run: what can be measured, each one entry of a registry.

A kind names its config, the function that does the work, the notebook that shows it and the source files that can change
its result (they enter the run key). Adding a kind is one entry here, one function and one notebook.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsai_core.errors import UserError
from lsai_core.parallel.world import World
from lsai_core.strict import Strict


@dataclass
class Context:
    """What a kind's function may use: its own folder, where data and other records lie, and a way to show progress.

    `world`: the processes that execute this run together; of one, until a kind launches more (`parallel.launch`).
    """

    folder: Path
    data_root: Path
    runs_root: Path
    on_rows: Callable[[list[dict[str, Any]]], None] = lambda rows: None
    world: World = field(default_factory=World)


@dataclass(frozen=True)
class Kind:
    """`config` and `run` are `module:name`, so that listing kinds imports nothing heavy. `code`: paths below lsai_core/.

    `timed`: False if what it finds is no time or speed (a largest size), so that on a CPU two such runs can share the machine.
    """

    config: str
    run: str
    notebook: str
    code: tuple[str, ...]
    uses_data: bool = False
    timed: bool = True

    def config_class(self) -> type[Strict]:
        return _load(self.config)

    def function(self) -> Callable[[Any, Context], dict[str, Any]]:
        return _load(self.run)


_MODEL = (
    "config.py",
    "presets.py",
    "model.py",
    "rope.py",
    "loss.py",
    "norm.py",
    "swiglu.py",
    "mlp_chunks.py",
    "products.py",
    "recompute.py",
    "attention",
    "context",
    "kernels",
    "train/adapt.py",
    "train/saved_inputs.py",
    "fp8",
    "attention/measured.json",
    "profiling/memory.py",
    "profiling/live_tensors.py",
    "profiling/steptime.py",
)

# How the processes are started cannot change what they compute; what they do together can.
_PARALLEL = (
    "parallel/world.py",
    "parallel/processes.py",
    "parallel/fsdp.py",
    "parallel/sequence.py",
    "parallel/checkpoint.py",
)

KINDS: dict[str, Kind] = {
    "train": Kind(
        "lsai_core.config:TrainConfig",
        "lsai_core.runs.training:run",
        "run-training.ipynb",
        (*_MODEL, "hf.py", "train", *_PARALLEL, "data/batches.py", "profiling/flops.py", "runs/training.py"),
        uses_data=True,
    ),
    "batch_search": Kind(
        "lsai_core.runs.batch_search:BatchSearchConfig",
        "lsai_core.runs.batch_search:run",
        "run-batch-search.ipynb",
        (
            *_MODEL,
            "train/step.py",
            "train/optimizer.py",
            "train/adamw.py",
            "train/adam8bit.py",
            "train/precision.py",
            "runs/batch_search.py",
            "runs/search.py",
            "runs/tries.py",
        ),
        timed=False,
    ),
    "model_search": Kind(
        "lsai_core.runs.model_search:ModelSearchConfig",
        "lsai_core.runs.model_search:run",
        "run-model-search.ipynb",
        (
            *_MODEL,
            "train/step.py",
            "train/optimizer.py",
            "train/adamw.py",
            "train/adam8bit.py",
            "train/precision.py",
            *_PARALLEL,
            "runs/model_search.py",
            "runs/model_size.py",
            "runs/search.py",
            "runs/tries.py",
        ),
        timed=False,
    ),
    "ceilings": Kind(
        "lsai_core.runs.machine:CeilingsConfig",
        "lsai_core.runs.machine:run",
        "run-machine.ipynb",
        ("profiling/ceilings.py", "runs/machine.py"),
    ),
    "gemm": Kind(
        "lsai_core.runs.gemm_bench:GemmConfig",
        "lsai_core.runs.gemm_bench:run",
        "run-gemm.ipynb",
        (
            "config.py",
            "presets.py",
            "fp8/tensorwise.py",
            "fp8/shapes.py",
            "profiling/ceilings.py",
            "runs/gemm_bench.py",
        ),
    ),
    # Without attention/measured.json: the table is made from these runs and changes none of their times.
    "attention": Kind(
        "lsai_core.runs.attention_bench.config:AttentionBenchConfig",
        "lsai_core.runs.attention_bench.bench:run",
        "run-attention.ipynb",
        ("attention", "profiling/live_tensors.py", "runs/attention_bench", "runs/attention_table.py"),
    ),
    "context": Kind(
        "lsai_core.runs.context_bench.config:ContextBenchConfig",
        "lsai_core.runs.context_bench.bench:run",
        "run-context.ipynb",
        (
            "attention",
            "attention/measured.json",
            "context",
            "kernels",
            "parallel/processes.py",
            "profiling/trace.py",
            "runs/attention_bench",
            "runs/context_bench",
        ),
    ),
    "scale": Kind(
        "lsai_core.runs.scale:ScaleConfig",
        "lsai_core.runs.scale:run",
        "run-scale.ipynb",
        (*_MODEL, "train/precision.py", *_PARALLEL, "runs/scale.py", "runs/scale_child.py"),
    ),
    "peer": Kind(
        "lsai_core.peers.config:PeerConfig",
        "lsai_core.runs.peer:run",
        "run-peer.ipynb",
        # Of our own trainer a peer uses nothing; what it is given and how it is timed can change its result.
        (
            "config.py",
            "presets.py",
            "peers",
            "data/batches.py",
            "profiling/steptime.py",
            "profiling/flops.py",
            "runs/peer.py",
        ),
        uses_data=True,
    ),
}


def get_kind(name: str) -> Kind:
    """The kind called `name`; UserError lists the known ones."""
    if name not in KINDS:
        raise UserError(f"unknown kind of run {name!r}; known: {', '.join(KINDS)}")
    return KINDS[name]


def _load(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
