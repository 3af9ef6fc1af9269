"""The `peer` kind: the same model, data shape and machine with another trainer, for a fair
comparison with our own.

The peer runs in processes of its own, watched as those of a run of several are (`lsai_lab.launch`).
The results have the names and the meaning of the `train` kind's. The peer's model must have exactly
our number of parameters.
"""

import importlib
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from lsai_core.base import compiler
from lsai_core.base.errors import Unavailable
from lsai_core.base.files import write_json
from lsai_core.model.transformer import count_parameters
from lsai_core.profiling import flops
from lsai_lab.benches.machine import peak_of_this_machine, rated
from lsai_lab.data import prepare
from lsai_lab.launch.launch import require_devices, watched
from lsai_lab.machine.environment import package_version
from lsai_lab.peers import hf, megatron
from lsai_lab.peers.config import PeerConfig, needed_packages
from lsai_lab.peers.watch import FOLDER
from lsai_lab.runs.kinds import Context

# The adapters to torchtitan by its series; an adapter says how a peer is started and what its
# process does.
SERIES = {"0.2": "lsai_lab.peers.titan", "0.3": "lsai_lab.peers.titan3"}


def run(config: PeerConfig, context: Context) -> dict[str, Any]:
    """Train with the peer and measure; returns the flat results of `summary.json`, its output is in
    `logs/`."""
    found = {name: package_version(name) for name in needed_packages(config.model_dump())}
    framework = importlib.import_module(adapter(config, found.get("torchtitan")))
    # This does not initialize CUDA: this process holds no memory that the peer could use.
    on_gpu = config.device != "cpu" and torch.cuda.device_count() > 0
    if config.needs_gpu and not on_gpu:
        raise Unavailable("needs a CUDA GPU and torch sees none here")
    if missing := [name for name, version in found.items() if version is None]:
        raise Unavailable(f"{', '.join(missing)} is not installed; pip install {' '.join(missing)}")
    require_devices(config.device, config.parallel.world_size)
    compiler.require(config.compile, torch.device("cuda" if on_gpu else "cpu"))

    dataset = prepare(config.data, context.data_root)
    folder = (context.folder / "peer").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    (context.folder / "metrics.jsonl").unlink(missing_ok=True)
    job = {"config": config.model_dump(mode="json"), "dataset": str(dataset.folder.resolve())}
    write_json(folder / "job.json", job | {"adapter": framework.__name__})
    words, variables = framework.start(config, dataset, folder)
    command = shown_command(words, variables, folder)
    print(command, flush=True)
    variables, nproc = _surroundings(config, folder) | variables, config.parallel.world_size
    measured = watched(
        words, folder.parent, nproc=nproc, on_rows=context.on_rows, variables=variables
    )
    per_token = flops.flops_per_token(config.model, config.seq_len)  # peers have no windows
    peak = peak_of_this_machine(
        torch.device("cuda" if on_gpu else "cpu"), config.precision, context.runs_root
    )
    return {
        **measured,
        **rated(measured.get("tokens_per_s"), per_token, peak, nproc, on_gpu),
        "parameters_non_embedding": count_parameters(config.model).non_embedding,
        "dataset": dataset.folder.name,
        "text_tokens": len(dataset.tokens("train")),
        "framework": config.framework,
        "command": command,
        "versions": ", ".join(
            f"{name} {version}" for name, version in {"torch": torch.__version__, **found}.items()
        ),
        **({"arguments": framework.tuning(config, on_gpu)} if hasattr(framework, "tuning") else {}),
    }


def shown_command(words: Sequence[str], variables: Mapping[str, str], folder: Path) -> str:
    """The command line as a reader may repeat it: `$RUN` for the run's folder, no path of this
    machine."""
    given = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    line = shlex.join(["python" if word == sys.executable else word for word in words])
    return " ".join(
        [*given, f"{FOLDER}=$RUN/{folder.name}", line.replace(str(folder.parent), "$RUN")]
    )


def _surroundings(config: PeerConfig, folder: Path) -> dict[str, str]:
    """Nothing is looked for on the network, and no cache outside of the run's folder is written."""
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    # A trainer that sees more GPUs than it has processes may use them.
    first = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    own = {"TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(folder / "cache"), FOLDER: str(folder)}
    return offline | own | (first if config.parallel.world_size == 1 else {})


def adapter(config: PeerConfig, version: str | None) -> str:
    """The module that serves, with this `version` of torchtitan. Raises Unavailable: none, or it
    cannot do what is asked."""
    if config.framework != "torchtitan":
        return {"hf": hf, "megatron": megatron}[config.framework].__name__
    series, instead = ".".join((version or "0.2").split(".")[:2]), "pip install torchtitan==0.2.2"
    if series not in SERIES:
        raise Unavailable(
            f"torchtitan {version} has other options than {', '.join(SERIES)}, which are known; "
            f"{instead}"
        )
    if series == "0.3" and Version(torch.__version__) < Version("2.14"):
        raise Unavailable(
            f"torchtitan {version} needs torch 2.14, this is {torch.__version__}; {instead}"
        )
    recipe = "rowwise" if series == "0.3" else "tensorwise"
    if config.fp8 not in ("none", recipe):
        raise Unavailable(f"with torchtitan {version} fp8 is {recipe}, not {config.fp8}")
    return SERIES[series]
