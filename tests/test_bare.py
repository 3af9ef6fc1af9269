"""Without the laboratory's packages: the core alone in an environment that holds torch, numpy and
pydantic only.

The environment is a folder of links to those three distributions and what they themselves require;
Python runs without its site-packages, so that nothing else is there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from conftest import CHECKOUT, TINY_MODEL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ALONE = ("torch", "numpy", "pydantic")


def required(names: tuple[str, ...]) -> set[str]:
    """The distributions `names` and all that they require here, without extras."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        found.add(name)
        for need in map(Requirement, distribution(name).requires or []):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                left.append(need.name)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with those distributions, and the project's packages as they stand here."""
    site = tmp_path_factory.mktemp("site")
    for name in required(ALONE):
        files = distribution(name).files or []
        tops = {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(distribution(name).locate_file(top))
    for name in ("lsai_core", "lsai_lab"):
        (site / name).symlink_to(CHECKOUT / name)
    return site


def run(site: Path, where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python with nothing but the standard library and `site`."""
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", *words]
    return subprocess.run(command, env=env, cwd=where, capture_output=True, text=True)


TRAIN = f"""
import json, sys
from pathlib import Path
import numpy as np
from lsai_core import TrainConfig, predict, train
from lsai_core.base.errors import Unavailable
from lsai_core.model.hf import save_hf

class Text:
    def tokens(self, split):
        return (np.arange(4_000) % 7).astype(np.uint16)

settings = {{"model": {TINY_MODEL!r}, "data": {{"vocab_size": 320}}, "device": "cpu", "steps": 12}}
settings |= {{"seq_len": 32, "batch_size": 4, "log_every": 1, "checkpoint": {{"every": 6}}}}
settings |= {{"optim": {{"lr": 1e-2, "warmup_steps": 2}}, "eval": {{"batches": 2}}}}
config = TrainConfig.model_validate(settings)
trained = train(config, Text(), Path("out"))
told = {{"losses": [row["loss"] for row in trained.rows], "validation": trained.validation_loss}}
told |= {{"peak": trained.measured["mem_peak_allocated_gib"], "predicted": predict(config).peak}}
try:
    save_hf(trained.model, Path("exported"))
except Unavailable as error:
    told["export"] = str(error)
others = ("pandas", "psutil", "safetensors", "yaml", "typer", "tqdm", "packaging", "papermill")
told["others"] = [name for name in others if name in sys.modules]
print(json.dumps(told))
"""


def test_the_core_trains_and_predicts_alone(bare: Path, tmp_path: Path) -> None:
    done = run(bare, tmp_path, "-c", TRAIN)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert len(told["losses"]) == 12 and told["losses"][-1] < told["losses"][0]
    assert told["validation"] > 0 and told["peak"] > 0 and told["predicted"] > 0
    assert "pip install safetensors" in told["export"] and not told["others"]


def test_the_laboratory_says_which_package_is_missing_and_what_brings_it(
    bare: Path, tmp_path: Path
) -> None:
    done = run(bare, tmp_path, "-m", "lsai_lab.cli", "doctor")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "pip install 'lsai[report]'" in done.stderr
    done = run(bare, tmp_path, "-c", "import lsai_lab as lab; lab.load")
    last = done.stderr.splitlines()[-1]
    assert "UserError" in last and "pip install 'lsai[report]'" in last
