"""What a run depends on beside its config, by content: the code, the text, and the weights that it
begins from.

Their ids are part of the run key and stand in `run.json`; they are compared again before and after
the run.
"""

import functools
import glob
import hashlib
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lsai_core
from lsai_core.base.errors import Unavailable
from lsai_core.config.affects import key_values
from lsai_core.config.strict import Strict
from lsai_core.config.train import DataConfig
from lsai_core.training.own_techniques import own_techniques
from lsai_lab.project.files import content_hash, matching_paths


def resolved_paths(config: dict[str, Any], root: Path) -> dict[str, Any]:
    """`config` with its relative paths resolved: they are seen from the folder of the person who
    plans, a run works in `root`.

    A path below `root` is written as seen from there, so that records name no folder of one
    machine.
    """
    data, weights = (config.get("data") or {}), config.get("init_from")
    changed = dict(config)
    if isinstance(data, dict):
        changed |= {"data": {**data, **_resolved_data(data, root.resolve())}} if data else {}
    if isinstance(weights, str) and (folder := _checkpoint(weights)) is not None:
        named = Path(os.environ.get("LSAI_DATA", "data")) / "models" / weights
        changed["init_from"] = weights if folder == named else os.path.abspath(folder)
    return changed


def _resolved_data(data: dict[str, Any], root: Path) -> dict[str, str]:
    kind, _, place = str(data.get("source", "")).partition(":")
    places = {
        "source": place if kind in ("file", "tokens") else "",
        "tokenizer": data.get("tokenizer"),
    }
    found = {}
    for key, given in places.items():
        pattern = os.path.expanduser(given) if isinstance(given, str) else ""
        if pattern and not os.path.isabs(pattern) and matching_paths(pattern):
            found[key] = _seen_from(root, pattern)
    return found | ({"source": f"{kind}:{found['source']}"} if "source" in found else {})


def _seen_from(root: Path, pattern: str) -> str:
    """A path or glob of the current folder, as it means the same in `root`."""
    path = os.path.abspath(pattern)
    if Path(path).is_relative_to(root):
        return os.path.relpath(path, root)
    if os.path.exists(path):
        return path
    # only `pattern` is a glob
    return os.path.normpath(os.path.join(glob.escape(os.getcwd()), pattern))


def key_config(config: Strict) -> dict[str, Any]:
    """The config as the run key sees it: without the places of inputs, whose content the key has
    anyway."""
    value = key_values(config)
    if isinstance(data := value.get("data"), dict):
        kind, _, _ = str(data.get("source")).partition(":")
        value["data"] = {**data, "source": kind} if kind in ("file", "tokens") else data
        value["data"] |= {"tokenizer": "given"} if data.get("tokenizer") else {}
    if value.get("init_from"):
        value["init_from"] = "weights"
    return value


def run_inputs(
    config: Strict, uses_data: bool, dataset_id: Callable[[DataConfig], str]
) -> dict[str, str]:
    """The ids of what a run reads: its text, as `dataset_id` tells, the laboratory's own techniques
    that it names, and the weights it begins from; `""` for what is not there."""
    data, weights = getattr(config, "data", None), getattr(config, "init_from", None)
    found = {"data": dataset_id(data)} if uses_data and isinstance(data, DataConfig) else {}
    found |= own_techniques(config)
    return found | ({"weights": _weights_id(weights)} if weights else {})


def _weights_id(name: str) -> str:
    """Hash of a checkpoint's content; empty if it is not there."""
    if (folder := _checkpoint(name)) is None:
        return ""
    files = sorted(
        path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin")
    )
    stamps = [(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(lambda stamp: _digest(*stamp), stamps))
    text = repr([(path.name, digest) for path, digest in zip(files, digests, strict=True)])
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _checkpoint(name: str) -> Path | None:
    # with torch, for which not every command has the time
    from lsai_core.model.hf import find_checkpoint

    try:
        return find_checkpoint(name)
    except Unavailable:
        return None


@functools.cache
def _digest(path: Path, size: int, changed_ns: int) -> str:
    return str(content_hash(path).hexdigest())


@functools.cache
def git_state(root: Path) -> dict[str, Any]:
    """`{commit, dirty}` of the checkout at `root`, or $LSAI_COMMIT (set it when you copy the code
    to a machine or into a container without its history); without either both are null."""
    if os.environ.get("LSAI_COMMIT"):
        return {"commit": os.environ["LSAI_COMMIT"], "dirty": None}
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        told = ""
    commit, _, dirty = told.partition("-")
    return {"commit": commit or None, "dirty": bool(dirty) if commit else None}


def code_facts(code: str, root: Path) -> dict[str, Any]:
    """What `summary.json` keeps about the code of a run, of which `code` is the hash."""
    return {"version": lsai_core.__version__, "hash": code, **git_state(root)}
