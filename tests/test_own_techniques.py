"""A technique in a laboratory's own folder: one file, named by a config, hashed into the run's key;
and what is refused in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CHECKOUT, Project

SIGN = '''"""Steps of equal length along the sign of the gradient."""

import torch

from lsai_core.optimizers.base import Optimizer, decayed


class Sign(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


OPTIMIZER = Optimizer(lambda parameters, optim: Sign(decayed(parameters, optim), optim.lr))
'''
SMOOTH = """
import torch.nn.functional as F

def LOSS(logits_NV, targets_N):
    return F.cross_entropy(logits_NV, targets_N, label_smoothing=0.5)
"""
PLAIN = """
import torch
from lsai_core.attention.registry import FLOATING, Backend, band_mask, repeat_kv

def plain(q, k, v, window, causal):
    k, v = (repeat_kv(x, q.shape[2]) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * q.shape[3] ** -0.5
    if causal:
        scores = scores.masked_fill(~band_mask(q.shape[1], window, q.device), float("-inf"))
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1).to(v.dtype), v)

BACKEND = Backend("plain", plain, dtypes={"cpu": FLOATING, "cuda": FLOATING})
"""
FILES = {"optimizers/sign": SIGN, "losses/smooth": SMOOTH, "attention/plain": PLAIN}


@pytest.fixture
def project(new_project: Callable[..., Project]) -> Project:
    made = new_project()
    for name, text in FILES.items():
        write(made, name, text)
    return made


def write(project: Project, name: str, text: str) -> Path:
    path = project.root / "techniques" / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def folders(project: Project, *settings: str) -> list[str]:
    """The folder of the run that these settings plan."""
    pairs = [word for setting in settings for word in ("--set", setting)]
    code, out, err = project.lsai(
        "study", "memory", "--parts", "train", "--dry-run", "--json", *pairs
    )
    assert code == 0, err
    return [Path(row["folder"]).name for row in json.loads(out)]


def refused(project: Project, *settings: str) -> str:
    pairs = [word for setting in settings for word in ("--set", setting)]
    program = project.start("train", *pairs)
    _, err = program.communicate(timeout=120)
    assert program.returncode == 2 and "Traceback" not in err, err
    return err.strip()


def test_all_three_train_and_are_predicted_and_stand_in_the_record(project: Project) -> None:
    settings = ["optim.name=sign", "optim.lr=1e-3", "loss=smooth", "attention.backend=plain"]
    pairs = [word for setting in settings for word in ("--set", setting)]
    code, _, err = project.lsai("train", *pairs)
    assert code == 0, err
    run = project.found()["baseline"]
    results = run.summary.results
    assert results["attention_kernel"] == "plain"
    assert set(run.plan["inputs"]) == {"data", *FILES}
    # half of the smoothed loss is the mean over all words, far above the cross-entropy
    assert results["train_loss"] > results["validation_loss"] + 0.02
    asked = ("--study", "memory", *pairs, "--gpu", "24GiB", "--json")
    code, out, err = project.lsai("predict", *asked)
    assert code == 0, err
    assert json.loads(out)["parts_gib"]["optimizer"] == 0  # it keeps nothing


def test_the_example_of_the_guide_trains(project: Project) -> None:
    guide = (CHECKOUT / "notebooks" / "README.md").read_text()
    told = guide.partition("## A technique of your own")[2].partition("\n## ")[0]
    optimizer, attention = re.findall(r"(?s)```python\n(.*?)```", told)
    for name, source in (("optimizers/momentum", optimizer), ("attention/mine", attention)):
        assert f"`techniques/{name}.py`" in told
        write(project, name, source)
    settings = ("--set", "optim.name=momentum", "--set", "attention.backend=mine")
    code, _, err = project.lsai("train", *settings)
    assert code == 0, err


def test_what_a_technique_raises_is_one_line_that_says_where(project: Project) -> None:
    write(project, "losses/wrong", "def LOSS(logits_NV, targets_N):\n    return nothing\n")
    where = "techniques/losses/wrong.py, line 2: NameError: name 'nothing' is not defined"
    code, out, err = project.lsai("train", "--set", "loss=wrong")
    assert code != 0 and where in out + err and "Traceback" not in out + err
    write(project, "optimizers/wrong", SIGN.replace("decayed(parameters, optim)", "parameters"))
    where = "techniques/optimizers/wrong.py, line 10: TypeError: optimizer can only optimize"
    asked = ("--study", "memory", "--set", "optim.name=wrong", "--gpu", "24GiB")
    code, out, err = project.lsai("predict", *asked)
    assert code == 2 and err.startswith(f"error: {where}") and err.count("\n") == 1


def test_the_content_is_in_the_key_and_a_comment_is_not(project: Project) -> None:
    first, without = folders(project, "loss=smooth"), folders(project)
    write(project, "losses/smooth", "# softer\n" + SMOOTH)
    assert folders(project, "loss=smooth") == first
    write(project, "losses/smooth", SMOOTH.replace("0.5", "0.25"))
    assert folders(project, "loss=smooth") != first
    assert folders(project) == without, "what a run does not name has no part in its key"


def test_what_cannot_serve_is_refused_in_one_line(project: Project) -> None:
    said = refused(project, "optim.name=sgn")
    assert "unknown optimizer 'sgn'; did you mean sign?; a file techniques/optimizers/" in said
    assert "unknown loss 'smoth'; did you mean smooth?" in refused(project, "loss=smoth")
    said = refused(project, "attention.backend=plane")
    assert "unknown attention backend 'plane'; did you mean plain?" in said
    write(project, "attention/broken", "import torch\nimport no_such_package")
    said = refused(project, "attention.backend=broken")
    where = "techniques/attention/broken.py, line 2: ModuleNotFoundError: No module named"
    assert where in said
    write(project, "losses/unfinished", "def LOSS(logits_NV, targets_N)\n    return 0\n")
    said = refused(project, "loss=unfinished")
    assert "techniques/losses/unfinished.py, line 1: SyntaxError: expected ':'" in said
    write(project, "attention/empty", "")
    assert "empty.py declares no BACKEND" in refused(project, "attention.backend=empty")


BACKEND = "from lsai_core.attention.registry import FLOATING, Backend\n"
OPTIMIZER = "from lsai_core.optimizers.base import Optimizer\n"
WRONG = {
    "loss=number": ("losses/number", "LOSS = 3", "number.py: LOSS must be of type Callable, not 3"),
    "loss=float": ("losses/float", "LOSS = lambda logits, targets: 1.0", "of one number that"),
    "loss=rows": (
        "losses/rows",
        "LOSS = lambda logits, targets: logits.sum(1)",
        "not a tensor of shape (",
    ),
    "loss=cut": (
        "losses/cut",
        "LOSS = lambda logits, targets: logits.detach().mean()",
        "not a tensor without a gradient",
    ),
    "attention.backend=text": (
        "attention/text",
        f'{BACKEND}BACKEND = Backend("text", print, dtypes={{"cpu": "float32"}})',
        "techniques/attention/text.py, line 2: TypeError: dtypes of a Backend maps device types",
    ),
    "attention.backend=listed": (
        "attention/listed",
        f'{BACKEND}BACKEND = Backend("listed", print, dtypes=["float32"])',
        "not ['float32']",
    ),
    "attention.backend=four": (
        "attention/four",
        "BACKEND = 4",
        "four.py: BACKEND must be of type Backend, not 4",
    ),
    "attention.backend=narrow": (
        "attention/narrow",
        f'{BACKEND}BACKEND = Backend("narrow", lambda q, *_: q[..., :3], '
        'dtypes={"cpu": FLOATING, "cuda": FLOATING})',
        "attention backend narrow must return a tensor like q, (",
    ),
    "attention.backend=three": (
        "attention/three",
        f"{BACKEND}def function(q, k, v):\n    return q\n\n"
        'BACKEND = Backend("three", function, dtypes={"cpu": FLOATING, "cuda": FLOATING})',
        "techniques/attention/three.py, line 2: attention backend three must take "
        "(q_BSHD, k_BSKD, v_BSKD, window, causal), not (q, k, v)",
    ),
    "optim.name=bare": ("optimizers/bare", "OPTIMIZER = print", "must be of type Optimizer, not"),
    "optim.name=built": (
        "optimizers/built",
        f"{OPTIMIZER}OPTIMIZER = Optimizer(lambda parameters, optim: 3)",
        "optimizer built: its build must return a torch.optim.Optimizer, not 3",
    ),
}


def test_what_is_not_as_declared_is_told_in_one_line(project: Project) -> None:
    for setting, (name, text, said) in WRONG.items():
        write(project, name, text)
        asked = ("--study", "memory", "--set", setting, "--gpu", "24GiB")
        code, _, err = project.lsai("predict", *asked)
        assert code == 2 and said in err and err.count("\n") == 1, (setting, err)
    code, out, err = project.lsai("train", "--set", "loss=float")
    assert code != 0 and "must return the mean" in out + err and "Traceback" not in out + err
