"""The second computation of the claims agrees with the committed one, shares no code with it, and
sees a changed row, date or verdict."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("recompute", "recompute_estimators", "recompute_rivals")
SCRIPTS = [ROOT / "tests" / f"{name}.py" for name in NAMES]


def recompute(checkout: Path) -> tuple[int, str]:
    command = [sys.executable, SCRIPTS[0], checkout]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not process.stderr, process.stderr[-2000:]
    return process.returncode, process.stdout


def test_every_claim_follows_from_raw_rows_by_other_code() -> None:
    code, out = recompute(ROOT)
    assert code == 0 and out.endswith(" claims, 0 differ\n"), out
    claims = json.loads((ROOT / "reports" / "recorded" / "claims.json").read_text())["claims"]
    assert out.count("same    ") == len(claims) >= 65


def test_it_is_other_code() -> None:
    imported = set()
    for path in SCRIPTS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module))
    assert not {name for name in imported if name.startswith(("lsai", "torch", "pandas"))}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The records, of which what a test changes is its own."""
    recorded = tmp_path / "reports" / "recorded"
    recorded.mkdir(parents=True)
    shutil.copytree(ROOT / "params", tmp_path / "params")
    predictions = ROOT / "reports" / "predictions"
    (recorded.parent / "predictions").symlink_to(predictions)
    for path in (ROOT / "reports" / "recorded").iterdir():
        if path.is_dir():
            (recorded / path.name).symlink_to(path)
        else:
            shutil.copy(path, recorded)
    return tmp_path


def own(path: Path) -> Path:
    """The same file as one of the copy's own, with the folders above it."""
    for folder in reversed(path.parents):
        if folder.is_symlink():
            there = folder.readlink()
            folder.unlink()
            folder.mkdir()
            for child in there.iterdir():
                (folder / child.name).symlink_to(child)
    if path.is_symlink():
        there = path.readlink()
        path.unlink()
        shutil.copy(there, path)
    return path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def differing(out: str) -> list[str]:
    return [line.split()[1] for line in out.splitlines() if line.startswith("DIFFERS")]


def test_it_sees_a_changed_loss_and_a_changed_step(copy: Path) -> None:
    runs = copy / "reports" / "recorded" / "h100"
    (folder,) = (runs / "largest").glob("bf16sr_1.long_loss-*")
    rows = own(folder / "metrics.jsonl")
    loss = next(
        json.loads(line)["validation_loss"]
        for line in reversed(rows.read_text().splitlines())
        if "validation_loss" in line
    )
    change(rows, f'"validation_loss": {loss}', f'"validation_loss": {loss + 0.01}')
    (folder,) = (runs / "course").glob("fp8-*")
    rows = own(folder / "metrics.jsonl")
    slower = [json.loads(line) for line in rows.read_text().splitlines()]
    slower = [row | {"step_ms": 1.1 * row["step_ms"]} for row in slower]
    rows.write_text("".join(json.dumps(row) + "\n" for row in slower))
    code, out = recompute(copy)
    assert code == 1 and differing(out) == ["states_rounded_long_loss", "course_fp8"], out


def test_it_sees_a_changed_date_and_a_changed_verdict(copy: Path) -> None:
    recorded = copy / "reports" / "recorded"
    change(recorded / "bounds.json", "2026-11-25T15:56:23", "2026-11-25T16:56:23")
    told = json.loads((recorded / "claims.json").read_text())
    (claim,) = [row for row in told["claims"] if row["name"] == "fp8_quality"]
    claim["verdict"] = "held"
    (recorded / "claims.json").write_text(json.dumps(told))
    code, out = recompute(copy)
    assert code == 1 and differing(out) == ["h100_bf16_titan", "fp8_quality"], out
