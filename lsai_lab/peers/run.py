"""The `peer` kind: the same model, data shape and machine with another trainer, for a fair comparison with our own.

The peer runs in processes of its own (`lsai_lab.peers.process`); the results have the names that the `train` kind uses, and what
they mean is the same: the median step outside warm-up, MFU from our FLOPs of our config, the peak of the allocator. The peer's model
must have exactly our number of parameters.
"""

from __future__ import annotations

import importlib
import shutil
from typing import Any

import torch

from lsai_core.errors import Unavailable
from lsai_core.files import write_json
from lsai_core.model import count_parameters
from lsai_core.profiling import flops
from lsai_lab.benches.machine import peak_of_this_machine, rated
from lsai_lab.data import prepare
from lsai_lab.environment import package_version
from lsai_lab.launch.launch import require_devices
from lsai_lab.peers.config import PeerConfig, needed_packages
from lsai_lab.peers.process import run_process, shown_command
from lsai_lab.runs.kinds import Context

_FRAMEWORKS = {"hf": "lsai_lab.peers.hf", "torchtitan": "lsai_lab.peers.titan"}


def run(config: PeerConfig, context: Context) -> dict[str, Any]:
    """Train with the peer and measure; returns the flat results of `summary.json`, its log is `peer.log`."""
    framework = importlib.import_module(_FRAMEWORKS[config.framework])
    # device_count does not initialize CUDA: this process holds no memory that the peer could use.
    on_gpu = config.device != "cpu" and torch.cuda.device_count() > 0
    if config.device == "cuda" and not on_gpu:
        raise Unavailable("needs a CUDA GPU and torch sees none here")
    framework.require(config, on_gpu)
    versions = _versions(config)
    require_devices(config.device, config.world_size)

    dataset = prepare(config.data, context.data_root)
    folder = (context.folder / "peer").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(
        folder / "job.json", {"config": config.model_dump(mode="json"), "dataset": str(dataset.folder.resolve())}
    )
    framework.prepare(config, dataset, folder)
    words, variables = framework.command(config, folder), framework.environment(config)
    command = shown_command(words, variables, folder)
    print(command, flush=True)
    measured = run_process(
        words,
        variables,
        folder,
        context.folder / "peer.log",
        processes=config.world_size,
        on_step=lambda step: context.on_rows([{"step": step - 1}]),
    )
    shutil.move(folder / "metrics.jsonl", context.folder / "metrics.jsonl")
    per_token = flops.flops_per_token(config.model, config.seq_len)
    peak = peak_of_this_machine(torch.device("cuda" if on_gpu else "cpu"), config.precision, context.runs_root)
    return {
        **measured,
        **rated(measured.get("tokens_per_s"), per_token, peak, config.world_size, on_gpu),
        "parameters_non_embedding": count_parameters(config.model).non_embedding,
        "dataset": dataset.folder.name,
        "framework": config.framework,
        "versions": versions,
        "command": command,
        "arguments": framework.tuning(config, on_gpu),
    }


def _versions(config: PeerConfig) -> str:
    """The peer's packages with their versions, in one line. Raises Unavailable for what is not installed."""
    names = needed_packages(config.model_dump())
    found = {name: package_version(name) for name in names}
    if missing := [name for name, version in found.items() if version is None]:
        raise Unavailable(f"{', '.join(missing)} is not installed; pip install {' '.join(missing)}")
    return ", ".join(f"{name} {version}" for name, version in {"torch": torch.__version__, **found}.items())
