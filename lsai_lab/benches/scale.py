"""The `scale` kind: what can be measured on one machine of what grows with the number of nodes.

Four things. `lsai_lab.benches.scale_child`, a process of its own, measures three of them: (1) what an FSDP2 step sends, (2) what a
sharded checkpoint puts on disk, (3) how long agents and ranks take to meet. Here, (4): what a run's record is, in files and bytes,
and how fast this disk takes such files. The chapter (`lsai_lab.report.scale`) carries them to many nodes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from lsai_core.config import ModelConfig, Precision
from lsai_core.errors import Unavailable
from lsai_core.files import atomic_writer
from lsai_core.strict import Strict, validated
from lsai_lab.files import repo_root
from lsai_lab.runs.kinds import Context
from lsai_lab.runs.records import Run, find_runs, recorded_runs


class Assumptions(Strict):
    """What this machine cannot measure: replace each by what your own cluster shows. Rates are per direction."""

    gpus_per_node: int = Field(4, gt=0)
    nvlink_gb_per_s: float = Field(150.0, gt=0, description="per GPU, to the other GPUs of its node")
    network_gb_per_s: float = Field(25.0, gt=0, description="per GPU, to other nodes (one adapter per GPU)")
    nvlink_latency_us: float = Field(5.0, ge=0, description="one step of a ring within a node")
    network_latency_us: float = Field(15.0, ge=0, description="one step of a ring that crosses nodes")
    filesystem_gb_per_s: float = Field(100.0, gt=0, description="the whole file system, shared by all ranks")
    memory_for_states_gib: float = Field(
        48.0, gt=0, description="of a GPU, for weights, gradients and optimizer states"
    )
    node_mtbf_days: float = Field(1000.0, gt=0, description="mean time between failures of one node")
    peak_tflops: float = Field(989.5, gt=0, description="dense bf16 peak of one GPU")
    mfu: float = Field(0.4, gt=0, le=1, description="used only where no recorded run on a GPU tells")
    tokens_per_gpu: int = Field(8192, gt=0, description="per optimizer step")
    seq_len: int = Field(8192, gt=0)
    variants: int = Field(8, gt=0, description="of a study")
    repeats: int = Field(3, gt=0, description="of each variant")


class ScaleConfig(Strict):
    """What is measured (`model` to `record_copies`) and what the chapter computes from it (`shapes` to `assume`)."""

    model: ModelConfig = Field(description="trained for two steps to count what is sent and saved")
    precision: Precision = "bf16_autocast"
    layouts: list[tuple[int, int]] = Field(description="(shard, replicate) worlds of CPU processes")
    agents: list[int] = Field(description="how many agents (one per node) meet by torchrun's rendezvous")
    clients: list[int] = Field(description="how many ranks meet in one TCPStore")
    repeats: int = Field(5, gt=0, description="of each TCPStore measurement; the median counts")
    record_copies: int = Field(20, gt=0, description="how often a record is written anew to time the disk")
    shapes: dict[str, ModelConfig]
    nodes: list[int]
    shard_nodes: list[int] = Field(description="HSDP: nodes that share one copy of the model")
    assume: Assumptions = Assumptions()

    @field_validator("layouts", mode="before")
    @classmethod
    def _yaml_lists_are_tuples(cls, pairs: Any) -> Any:
        return [tuple(pair) if isinstance(pair, list) else pair for pair in pairs] if isinstance(pairs, list) else pairs


def run(config: ScaleConfig, context: Context) -> dict[str, Any]:
    """Measure; returns the results: `layouts`, `agents`, `clients` (one mapping per row) and the record's figures."""
    import torch.distributed as dist

    if not dist.is_available() or not hasattr(os, "fork"):
        raise Unavailable("counting collectives needs torch.distributed and fork (Linux or macOS)")
    results = _in_child(config, context.folder)
    results |= _records(config, context)
    return results


def _in_child(config: ScaleConfig, folder: Path) -> dict[str, Any]:
    """Results of `scale_child.main` in a fresh interpreter; what it printed last is the error if it failed."""
    environment = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1"}
    # The package may be found by the folder that the caller was started in only.
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")])
    )
    with tempfile.TemporaryDirectory(dir=folder, prefix="scale-") as work:
        (Path(work) / "config.json").write_text(config.model_dump_json())
        command = [sys.executable, "-m", "lsai_lab.benches.scale_child", work]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the measuring process ended with {done.returncode}: {done.stderr[-2000:]}")
        return json.loads((Path(work) / "results.json").read_text(encoding="utf-8"))


def read_config(recorded: dict[str, Any]) -> ScaleConfig:
    """The config of a `config.json`, as the records keep it."""
    return validated(ScaleConfig, recorded, "config.json of a scale run")


def _records(config: ScaleConfig, context: Context) -> dict[str, Any]:
    """Files and bytes of the median training record there is, and the time to write such a record anew, file by file."""
    runs = [*find_runs(context.runs_root), *recorded_runs(repo_root() / "reports")]
    sizes = {run.folder: _sizes(run) for run in runs if run.summary.kind == "train"}
    if not sizes:
        raise Unavailable("there is no training record to count yet; run another study first: lsai study memory")
    typical = sorted(sizes.values(), key=sum)[len(sizes) // 2]
    with tempfile.TemporaryDirectory(dir=context.folder, prefix="records-") as folder:
        started = time.perf_counter()
        for copy in range(config.record_copies):
            for number, size in enumerate(typical):
                with atomic_writer(Path(folder) / f"{copy}" / f"{number}") as file:
                    file.write(os.urandom(size))
        seconds = time.perf_counter() - started
    return {
        "records_counted": len(sizes),
        "record_files": len(typical),
        "record_bytes": sum(typical),
        "record_write_s": seconds / config.record_copies,
        "record_files_per_s": config.record_copies * len(typical) / seconds,
    }


def _sizes(run: Run) -> list[int]:
    """Sizes of a record's own files (no hidden ones, no folders), in bytes."""
    return [path.stat().st_size for path in run.folder.iterdir() if path.is_file() and path.name[0] != "."]
