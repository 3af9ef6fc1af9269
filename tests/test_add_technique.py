"""A technique is one file in the core and one line of YAML: tried on a copy of the tree, with what
everything else makes of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from conftest import CHECKOUT, TINY_MODEL

JOB = CHECKOUT / "tests" / "technique_job.py"
SGD = '''"""SGD with momentum."""

import torch

from lsai_core.optimizers.base import Optimizer, decayed


def _build(parameters, optim):
    return torch.optim.SGD(decayed(parameters, optim), lr=optim.lr, momentum=optim.betas[0])


OPTIMIZER = Optimizer(_build)
'''
MUON = '''"""Muon for the blocks' matrices, AdamW for embedding, output and norms."""

import torch

from lsai_core.optimizers.base import Composed, Optimizer
from lsai_core.optimizers.kinds import adamw


def _build(parameters, optim):
    rest = dict(parameters)
    names = [name for name, p in parameters.items() if p.ndim == 2 and name.startswith("blocks.")]
    muon = torch.optim.Muon(
        [rest.pop(name) for name in names],
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return Composed([muon, adamw.OPTIMIZER.build(rest, optim)])


OPTIMIZER = Optimizer(_build)
'''
# An optimizer of two that saves and restores nothing of what the two keep.
FORGETFUL = (
    MUON.replace("return Composed(", "return Both(")
    + """

class Both(torch.optim.Optimizer):
    def __init__(self, parts):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure=None):
        for part in self.parts:
            part.step()
"""
)
BACKEND = '''"""Attention by logarithms of weights, for 16-bit and other inputs alike."""

import torch

from lsai_core.attention.registry import FLOATING, Backend, band_mask, repeat_kv


def own(q, k, v, window, causal):
    k, v = (repeat_kv(x, q.shape[2]) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * q.shape[3] ** -0.5
    if causal:
        scores = scores.masked_fill(~band_mask(q.shape[1], window, q.device), float("-inf"))
    return torch.einsum("bhst,bthd->bshd", scores.log_softmax(-1).exp().to(v.dtype), v)


BACKEND = Backend(
    "own",
    own,
    dtypes={"cpu": FLOATING, "cuda": FLOATING},
    about="by logarithms",
    color="#00FF00",
    marker="d",
)
'''
# A model option: norms of queries and keys, a head's parameters each.
QK_NORM = {
    "lsai_core/config/model.py": [
        ("    tie_embeddings: bool = False\n", "    qk_norm: bool = False\n")
    ],
    "lsai_core/model/transformer.py": [
        (
            "        self.output = nn.Linear(config.d_model, config.d_model, bias=False)\n",
            "        width = self.head_dim\n"
            "        self.qk_norm = Norm(width, config.norm_eps) if config.qk_norm else None\n",
        ),
        (
            "        q_BSHD, k_BSKD, v_BSKD = qkv_BSHD.split(self.heads, dim=2)\n",
            "        if self.qk_norm is not None:\n"
            "            q_BSHD, k_BSKD = self.qk_norm(q_BSHD), self.qk_norm(k_BSKD)\n",
        ),
    ],
}
OPAQUE = """
from lsai_core.attention.registry import FLOATING, Backend

def opaque(q, k, v, window, causal):
    return q + q.data_ptr()

BACKEND = Backend("opaque", opaque, dtypes={"cuda": FLOATING})
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages and parameters, with an optimizer and a backend more: a file each."""
    root = tmp_path_factory.mktemp("tree")
    for name in ("lsai_core", "lsai_lab", "params"):
        shutil.copytree(CHECKOUT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in (("sgd", SGD), ("muon", MUON), ("forgetful", FORGETFUL)):
        (root / f"lsai_core/optimizers/kinds/{name}.py").write_text(text)
    (root / "lsai_core/attention/backends/own.py").write_text(BACKEND)
    for name, additions in QK_NORM.items():
        text = (root / name).read_text()
        for line, added in additions:
            assert text.count(line) == 1
            text = text.replace(line, line + added)
        (root / name).write_text(text)
    return root


def python(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(tree), "LSAI_ROOT": str(tree), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=env, cwd=tree, capture_output=True, text=True
    )


def link(folder: Path, at: Path) -> None:
    at.parent.mkdir(parents=True, exist_ok=True)
    at.symlink_to(folder)


def done(tree: Path, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """One process trains, resumes, predicts and searches; then two train sharded."""
    folder.mkdir(exist_ok=True)
    answers: dict[str, Any] = {}
    for launcher, parts in (
        ((), "train"),
        (("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"), "fsdp"),
    ):
        result = python(tree, *launcher, str(JOB), str(folder), json.dumps(changes), parts)
        assert result.returncode == 0, result.stderr[-3000:]
        answers |= json.loads((folder / f"{parts}.json").read_text())
    return answers


def refusals(tree: Path, *changes: dict[str, Any]) -> list[str]:
    """The one line that each of these configs is refused with."""
    program = f"""
from lsai_core.config.train import TrainConfig
from lsai_core.base.errors import UserError
from lsai_core.training.combinations import checked
for changes in {changes}:
    try:
        checked(TrainConfig, {{"model": {{"preset": "lab-tiny"}}, **changes}}, "test")
    except UserError as error:
        print(error)
"""
    lines = python(tree, "-c", program).stdout.splitlines()
    assert len(lines) == len(changes)
    return lines


def assert_served(answers: dict[str, Any]) -> None:
    assert answers["losses"][-1] < answers["losses"][0]
    assert answers["resumed"] == answers["losses"]
    assert answers["sharded"] == pytest.approx(answers["losses"], rel=1e-4)
    assert answers["sharded_resumed"] == answers["sharded"]
    assert answers["searched"]["largest"] == 2
    assert all(parts["optimizer"] > 0 for parts in answers["predicted"].values())
    assert answers["counted"] == answers["measured"]["parameters"]
    assert answers["predicted_peak"] == pytest.approx(answers["measured"]["peak"], rel=0.01)
    assert answers["predicted_phases"] == pytest.approx(answers["measured"]["phases"], rel=0.01)
    assert answers["states_bytes"] == answers["measured"]["states_bytes"]


def test_a_new_optimizer_is_one_file(tree: Path, tmp_path: Path) -> None:
    answers = done(tree, tmp_path, {"optim": {"name": "sgd"}})
    assert_served(answers)
    assert answers["states_bytes"] == 4 * answers["counted"]
    assert answers["searched"]["name"] == "sgd"
    parts = answers["predicted"]["cpu"]
    assert parts["optimizer"] == pytest.approx(parts["weights"], rel=1e-3)  # one state a weight
    first, second = refusals(
        tree,
        {"optim": {"name": "sgd", "states": "8bit"}},
        {"optim": {"name": "sgd", "kernel": "triton"}},
    )
    assert "optim.name sgd has no states 8bit" in first and "kernel triton" in second


def test_an_optimizer_of_two_is_one_file(tree: Path, tmp_path: Path) -> None:
    """By names of parameters; what it keeps and needs in between is known everywhere."""
    wide = {"d_model": 128, "d_ff": 512, "n_heads": 4, "n_kv_heads": 2}
    answers = done(tree, tmp_path, {"optim": {"name": "muon", "lr": 3e-3}, "model": wide})
    assert_served(answers)
    plain = done(tree, tmp_path / "adamw", {"optim": {"lr": 3e-3}, "model": wide})
    assert answers["losses"] != plain["losses"]
    # One state of the blocks' matrices, two of everything else.
    matrices = 2 * (128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 512)
    assert plain["states_bytes"] - answers["states_bytes"] == 4 * matrices
    for on in ("cpu", "gpu"):
        assert answers["predicted"][on]["optimizer"] < plain["predicted"][on]["optimizer"]
    scratch = answers["predicted_phases"]["optimizer"] - plain["predicted_phases"]["optimizer"]
    assert scratch * 2**30 > 4 * (128 * 1024 - matrices)  # gate and up, at least once more
    first, second = refusals(
        tree,
        {"optim": {"name": "muon", "states": "8bit"}},
        {"optim": {"name": "muon", "rounding": "stochastic"}},
    )
    assert "optim.name muon has no states 8bit" in first and "rounding stochastic" in second
    asked = ("predict", "--model", "lab", "--set", "optim.name=muon", "--gpu", "h100")
    shown = python(tree, "-m", "lsai_lab.cli", *asked)
    assert shown.returncode == 0, shown.stderr


def test_an_optimizer_that_forgets_at_a_checkpoint_is_refused(tree: Path, tmp_path: Path) -> None:
    changes = json.dumps({"optim": {"name": "forgetful"}})
    result = python(tree, str(JOB), str(tmp_path), changes, "resume")
    assert result.returncode == 0, result.stderr[-3000:]
    answers = json.loads((tmp_path / "resume.json").read_text())
    assert "the optimizer kept" in answers["resumed"] and "and restored" in answers["resumed"]


def test_a_new_attention_backend_is_one_file(tree: Path, tmp_path: Path) -> None:
    answers = done(tree, tmp_path, {"attention": {"backend": "own"}})
    assert_served(answers)
    assert answers["searched"]["backend"] == "own"
    # It does not say that it is fused, so it keeps what its operations keep.
    assert answers["predicted"]["gpu"]["activations"] > 0.9 * answers["plain"]["activations"]
    assert answers["measured"]["exported"] == "written"
    own = {"backend": "own"}
    (tree / "lsai_core/attention/backends/opaque.py").write_text(OPAQUE)
    asked = ("predict", "--model", "lab-tiny", "--set", "attention.backend=opaque")
    refused = python(tree, "-m", "lsai_lab.cli", *asked)
    (tree / "lsai_core/attention/backends/opaque.py").unlink()
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert "backend 'opaque' cannot be simulated" in refused.stderr
    first, second = refusals(
        tree, {"attention": {**own, "window": 8}}, {"attention": own, "parallel": {"cp": 2}}
    )
    assert (
        "'own' has no sliding window; use auto, eager" in first
        and "'own' returns no log-sum-exp" in second
    )


def test_a_new_option_of_the_model_is_counted_and_not_exported(tree: Path, tmp_path: Path) -> None:
    plain = {"n_heads": 2, "n_layers": 2}
    answers = done(tree, tmp_path, {"model": {**plain, "qk_norm": True}})
    assert_served(answers)
    without = done(tree, tmp_path / "without", {"model": plain})
    assert answers["counted"] - without["counted"] == plain["n_layers"] * 16
    assert "no tensor for blocks.0.attention.qk_norm.weight" in answers["measured"]["exported"]
    assert not answers["measured"]["folder"] and without["measured"]["exported"] == "written"


@pytest.mark.slow
def test_a_variant_is_a_line_of_yaml(tree: Path, corpus: Path) -> None:
    """Settings alone, the new optimizer, the new backend: planned in every part, trained, and shown
    by the chapter; no claim changes."""
    new = {
        "colder": {"optim": {"lr": 1e-4}},
        "sgd": {"optim": {"name": "sgd", "kernel": "auto"}},
        "own": {"attention": {"backend": "own"}},
    }
    path = tree / "params/studies/memory.yaml"
    study = yaml.safe_load(path.read_text())
    study["base"] |= {
        "batch_size": 2,
        "steps": 12,
        "model": TINY_MODEL,
        "profile": {"memory_steps": 2},
    }
    study["base"]["data"] = {"source": f"file:{corpus}", "vocab_size": 320}
    for name, config in new.items():
        study["variants"][name] = {"label": f"new {name}", "config": config}
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    for name in ("notebooks", "reports"):
        shutil.copytree(
            CHECKOUT / name,
            tree / name,
            ignore=shutil.ignore_patterns("recorded", "_output", "_build", ".*"),
        )
    bounds = "reports/recorded/bounds.json"  # a tree without git's history has its dates from here
    link(CHECKOUT / bounds, tree / bounds)
    studies = list((CHECKOUT / "reports/recorded").glob("*/*"))
    for folder in (folder for folder in studies if folder.name != "memory"):
        link(folder, tree / folder.relative_to(CHECKOUT))
    for path in (tree / "params/profiles").iterdir():  # of every machine: sizes as the study says
        gpu = {"gpu": "*"} if path.stem == "gpu" else {}
        path.write_text(yaml.safe_dump({"profile": path.stem, "description": "plain", **gpu}))

    lsai = ("-m", "lsai_lab.cli")
    plan = python(tree, *lsai, "study", "memory", "--dry-run")
    for name in (f"memory.{variant}{part}" for variant in new for part in ("", ".batch")):
        assert f"{name} " in plan.stdout, plan.stderr
    asked = ("study", "memory", "--parts", "train", "--only", ",".join(["baseline", *new]))
    trained = python(tree, *lsai, *asked)
    assert trained.returncode == 0 and "outcomes: 4 ok" in trained.stdout, trained.stderr
    program = """
from pathlib import Path
from lsai_lab.runs.notebook import execute_notebook
if __name__ == "__main__":
    source, target = Path("notebooks/65-yours.ipynb"), Path("yours.ipynb")
    print(execute_notebook(source, target, {}, root=Path("."), timeout_s=600))
"""
    (tree / "chapter.py").write_text(program)
    chapter = python(tree, "chapter.py")
    assert chapter.stdout.strip() == "None", chapter.stdout + chapter.stderr
    cells = nbformat.read(tree / "yours.ipynb", as_version=4).cells
    shown = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    for name in new:
        assert any(f"new {name}" in data.get("image/svg+xml", "") for data in shown), name
        assert any(f"[new {name}" in data.get("text/markdown", "") for data in shown), name
    for folder in (folder for folder in studies if folder.name == "memory"):
        link(folder, tree / folder.relative_to(CHECKOUT))
    claims = json.loads(python(tree, *lsai, "claims", "--json").stdout)
    assert claims == json.loads((CHECKOUT / "reports/recorded/claims.json").read_text())
