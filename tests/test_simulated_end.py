"""A simulated program that ends with an error, and one that reads or saves what is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import Project
from torch import nn

import lsai_lab as lab
from lsai_core import simulated_gpu
from lsai_core.base.errors import UserError

GIB = 2**30
TRAIN = """import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(64, 64)).mean().backward()
    optimizer.step()
"""


def trained(steps: int = 2) -> torch.Tensor:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = torch.zeros(())
    for _ in range(steps):
        loss = model(torch.randn(64, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def test_after_an_error_no_verdict_is_known() -> None:
    line = trained.__code__.co_firstlineno  # this file's lines, far from those of the program
    with pytest.raises(UserError, match="no values for NumPy"), lab.simulated_gpu("24GiB") as gpu:
        trained()
        torch.zeros(1).numpy()
    assert gpu.fits is None and gpu.verdict == gpu.verdict_on("h100") == "cut off"
    assert gpu.remark.startswith("cut off at line ") and ": figures are up to there" in gpu.remark
    said = int(gpu.remark.split("line ")[1].split(":")[0])
    assert "numpy()" in Path(__file__).read_text().splitlines()[said - 1] and said > line
    assert "24 GiB: cut off; " in repr(gpu) and "figures are up to there" in repr(gpu)
    assert gpu.peak_allocated_gib > 0


def test_what_was_too_large_before_its_error_stays_so() -> None:
    with pytest.raises(ZeroDivisionError), simulated_gpu("24GiB") as gpu:
        torch.zeros(10**10)
        1 / 0  # noqa: B018
    assert gpu.fits is False and gpu.verdict == "too large"
    assert gpu.verdict_on("h200") == "cut off"


def test_a_script_that_ends_with_an_error_is_cut_off(shared: Project, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{TRAIN}torch.zeros(1).numpy()\ntorch.zeros(10**11)\n")
    code, out, err = shared.lsai("predict", "--script", str(path), "--gpu", "h100")
    assert code == 2 and "no values for NumPy" in err and len(err.splitlines()) == 1
    assert "): cut off" in out and "cut off at line 7: figures are up to there" in out
    code, out, _ = shared.lsai("predict", "--script", str(path), "--gpu", "h100", "--json")
    assert code == 2 and json.loads(out)["verdict"] == "cut off"
    path.write_text(f"{TRAIN}raise KeyboardInterrupt\n")
    code, out, _ = shared.lsai("predict", "--script", str(path), "--gpu", "h100")
    assert code == 1 and "cut off at line 7: figures are up to there" in out


def test_values_that_are_read_are_told_once_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with lab.simulated_gpu("h100") as gpu:
        loss = trained()
        shown = [f"{loss:.3f}", loss.item(), float(loss), bool(loss < 1e-3), loss.tolist()]
    told = "".join(capsys.readouterr())
    assert shown[:3] == ["0.000", 0.0, 0.0]
    assert told.count("simulated_gpu has no values") == 1 and len(told.splitlines()) == 1
    assert gpu.remark == "values were asked for 5 times: they are zeros"
    assert "values were asked for 5 times" in repr(gpu)
    assert gpu.fits is True
    said = " ".join((lab.simulated_gpu.__doc__ or "").split())
    assert "`.item()`, `float()` and comparisons see zeros" in said


def test_values_that_pytorch_reads_are_no_programs(capsys: pytest.CaptureFixture[str]) -> None:
    with simulated_gpu("h100") as gpu:
        model = nn.Linear(64, 64)
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
        for _ in range(2):
            scaler.scale(model(torch.randn(64, 64)).mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert gpu.remark == "" and "".join(capsys.readouterr()) == ""


def test_saving_says_once_that_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with simulated_gpu("h100"):
        for name in ("a.pt", "b.pt"):
            torch.save(nn.Linear(4, 4).state_dict(), tmp_path / name)
    told = "".join(capsys.readouterr())
    assert told.splitlines() == ["simulated_gpu has no values: torch.save writes nothing"]
    assert not [*tmp_path.iterdir()]


def test_the_peak_that_is_seen_inside_leaves_out_the_libraries() -> None:
    with lab.simulated_gpu("h100") as gpu:
        trained()
        inside = torch.cuda.max_memory_allocated() / GIB
    assert inside == pytest.approx(gpu.peak_allocated_gib - gpu.memory["libraries"])
    assert "max_memory_allocated() inside leaves out the libraries" in repr(gpu)
