"""Launching the processes of a run: stop signals, a killed process, errors of every kind, and
nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fsdp_fixture import config, dataset, pids, plan, write_text

from lsai_core.base.errors import Preempted, Unavailable, UserError
from lsai_core.base.files import read_jsonl
from lsai_core.training.loop import train
from lsai_lab.launch import launch as launcher
from lsai_lab.launch import watch
from lsai_lab.launch.launch import WorkerFailed, launch, on_this_machine, require_devices, torchrun
from lsai_lab.runs.execute import ActiveRun
from lsai_lab.runs.records import outcome_of


def error(rank: int, outcome: str, reason: str, at: float, user_error: bool = False) -> str:
    facts = json.dumps({"time": at, "outcome": outcome, "reason": reason, "user_error": user_error})
    return f"(logs / 'rank-{rank}.error.json').write_text({facts!r})"


@pytest.mark.slow
def test_a_run_survives_a_stop_signal_and_the_kill_of_a_process(tmp_path: Path) -> None:
    text, data = write_text(tmp_path), tmp_path / "data"
    settings: dict[str, Any] = {
        "steps": 60,
        "checkpoint": {"every": 10},
        "profile": {"memory_steps": 0},
    }
    run = config(text, parallel={"fsdp": 2}, **settings)
    dataset(run, data)
    folder = plan(run, tmp_path / "runs" / "test" / "faults")

    def stop(rows: list[dict[str, Any]]) -> None:
        if rows and rows[-1]["step"] >= 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted, match=r"after step \d+ of 60 \(SIGTERM\)"):
        launch(folder, data, 2, on_rows=stop)
    stopped_at = len(read_jsonl(folder / "metrics.jsonl"))
    assert [path.name for path in folder.glob("sharded-*")] == [f"sharded-{stopped_at:08d}"]

    killed: list[float] = []

    def kill(rows: list[dict[str, Any]]) -> None:
        if rows and rows[-1]["step"] >= max(25, stopped_at + 5) and not killed:
            os.kill(int((folder / "logs" / "rank-1.pid").read_text()), signal.SIGKILL)
            killed.append(time.monotonic())

    with pytest.raises(WorkerFailed, match="rank 1 was ended by SIGKILL"):
        launch(folder, data, 2, on_rows=kill)
    assert time.monotonic() - killed[0] < 60
    assert not any(psutil.pid_exists(pid) for pid in pids(folder))

    summary = ActiveRun(folder, data).execute()
    assert summary.outcome == "ok", summary.reason
    assert summary.results["resumed_at"] >= 20
    assert not list(folder.glob("sharded-*"))  # a finished run needs none

    alone = train(config(text, **settings), dataset(run, data), tmp_path)
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(60))
    assert (
        max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(rows, alone.rows, strict=True)) <= 1e-4
    )


STUBBORN = """
import os, signal, sys, time
from pathlib import Path
rank, logs = int(os.environ["RANK"]), Path(sys.argv[-2]) / "logs"
(logs / f"new-{rank}").write_text(str(os.getpid()))
(logs / f"new-{rank}").rename(logs / f"rank-{rank}.pid")
if rank == 1:
    time.sleep(1)
    END
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was ended by SIGKILL"),
        (
            error(1, "failed", "no such kernel", at=1.0) + "\n    sys.exit(1)",
            "rank 1: no such kernel; see",
        ),
    ],
    ids=["killed", "failed"],
)
def test_who_waits_for_a_dead_neighbour_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, message: str
) -> None:
    """As in a kernel on a GPU that nothing interrupts: torchrun would wait 30 seconds, and the
    cause is the first death."""
    script = tmp_path / "worker.py"
    script.write_text(STUBBORN.replace("END", end))
    monkeypatch.setattr(watch, "GRACE_S", 2.0)
    monkeypatch.setattr(launcher, "torchrun", lambda nproc: [*torchrun(nproc), str(script)])
    first: list[float] = []

    def look(_rows: list[dict[str, Any]]) -> None:
        if len(pids(tmp_path)) == 2 and not first:
            first.append(time.monotonic())

    with pytest.raises(WorkerFailed, match=message):
        launch(tmp_path, tmp_path, 2, on_rows=look)
    assert time.monotonic() - first[0] < 15
    assert not any(psutil.pid_exists(pid) for pid in pids(tmp_path))


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_a_stop_signal_before_the_first_step_counts(device: str, tmp_path: Path) -> None:
    """It comes while workers import, and is repeated while they compile; they end a few steps
    later."""
    text, data = write_text(tmp_path), tmp_path / "data"
    fp8 = {"precision": "bf16_autocast", "fp8": {"recipe": "fused"}} if device == "cuda" else {}
    settings: dict[str, Any] = {
        "steps": 2000,
        "log_every": 50,
        "profile": {"memory_steps": 0},
        "compile": True,
        **fp8,
    }
    run = config(text, device=device, parallel={"fsdp": 2, "fp8_gather": bool(fp8)}, **settings)
    dataset(run, data)
    folder = plan(run, tmp_path / "runs" / "test" / "early")
    told: list[int] = []

    def stop(_rows: list[dict[str, Any]]) -> None:
        if len(found := pids(folder)) == 2 and not told:
            told.extend(found)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted, match=r"after step \d+ of 2000 \(SIGTERM\)") as stopped:
        launch(folder, data, 2, on_rows=stop)
    done = re.search(r"after step (\d+)", str(stopped.value))
    assert done and int(done[1]) < 100  # in steps, for a busy machine compiles for minutes


SILENT_SERVER = """
import socket, subprocess, sys
socket.sethostname("nowhere")
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run(["mount", "--bind", sys.argv[1], "/etc/resolv.conf"], check=True)
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.53", 53))
sys.exit(subprocess.run(sys.argv[2:]).returncode)
"""


@pytest.mark.slow
def test_no_name_server_has_to_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a network of its own whose name server stays silent, two processes still meet within
    seconds."""
    text, data, names = write_text(tmp_path), tmp_path / "data", tmp_path / "resolv.conf"
    names.write_text("nameserver 127.0.0.53\n")
    alone = [
        "unshare",
        "--map-root-user",
        "--net",
        "--uts",
        "--mount",
        sys.executable,
        "-c",
        SILENT_SERVER,
        str(names),
    ]
    if (
        not shutil.which("unshare")
        or subprocess.run([*alone, "true"], capture_output=True).returncode
    ):
        pytest.skip("needs `unshare`, `ip` and the right to make namespaces")
    run = config(text, parallel={"fsdp": 2}, steps=4, profile={"memory_steps": 0})
    dataset(run, data)
    folder = plan(run, tmp_path / "runs" / "test" / "apart")
    code = (
        f"from pathlib import Path; from lsai_lab.launch.launch import launch; "
        f"launch(Path({str(folder)!r}), Path({str(data)!r}), 2)"
    )
    started = time.monotonic()
    subprocess.run([*alone, sys.executable, "-c", code], check=True, timeout=300)
    assert len(read_jsonl(folder / "metrics.jsonl")) == 4
    assert time.monotonic() - started < 60

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert on_this_machine()["GLOO_SOCKET_IFNAME"] == "ib0"


def fake_worker(folder: Path, body: str) -> list[str]:
    """A command in the place of torchrun that does what `body` says and ends with exit code 1."""
    script = folder / "fake.py"
    script.write_text(
        f"import json, sys, time\nfrom pathlib import Path\nlogs = "
        f"Path({str(folder / 'logs')!r})\n{body}\nsys.exit(1)\n"
    )
    return [sys.executable, str(script)]


@pytest.mark.parametrize(
    ("outcome", "user_error", "kind", "message"),
    [
        ("oom", False, MemoryError, "rank 3: CUDA out of memory"),
        ("unavailable", False, Unavailable, "CUDA out of memory"),
        ("failed", True, UserError, "CUDA out of memory"),
        ("failed", False, WorkerFailed, "rank 3: CUDA out of memory; see logs/rank-3.log"),
    ],
)
def test_the_earliest_error_is_the_cause(
    tmp_path: Path, outcome: str, user_error: bool, kind: type[Exception], message: str
) -> None:
    later = error(0, "failed", "connection closed by peer", at=2.0)
    body = later + "\n" + error(3, outcome, "CUDA out of memory", at=1.0, user_error=user_error)
    with pytest.raises(kind) as caught:
        launch(tmp_path, tmp_path, 4, command=fake_worker(tmp_path, body))
    assert str(caught.value) == message


def test_full_memory_below_another_error_is_the_cause() -> None:
    """A pipeline's schedule tells what went wrong in a stage by an error of its own."""

    def stage(cause: Exception) -> Exception:
        try:
            raise RuntimeError("[Stage 0] failed to run forward") from cause
        except RuntimeError as error:
            return error

    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 896.00 MiB.")
    assert outcome_of(stage(full)) == ("oom", str(full))
    assert outcome_of(stage(ValueError("a shape")))[0] == "failed"


def test_workers_that_say_nothing_leave_the_launchers_last_line(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="exit code 1: no such partition"):
        launch(tmp_path, tmp_path, 4, command=fake_worker(tmp_path, "print('no such partition')"))


def test_interrupting_the_launcher_leaves_no_process(tmp_path: Path) -> None:
    body = "(logs / 'rank-0.pid').write_text(str(__import__('os').getpid()))\n"
    body += "Path(logs.parent / 'metrics.jsonl').write_text('{\"step\": 0}\\n')\ntime.sleep(600)"

    def interrupt(rows: list[dict[str, Any]]) -> None:
        if rows:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(tmp_path, tmp_path, 1, on_rows=interrupt, command=fake_worker(tmp_path, body))
    assert not any(psutil.pid_exists(pid) for pid in pids(tmp_path))


def test_too_few_gpus_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    require_devices("auto", 2)
    require_devices("cpu", 8)
    with pytest.raises(Unavailable, match="needs 8 GPUs and torch sees 2"):
        require_devices("auto", 8)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    require_devices("auto", 4)
    with pytest.raises(Unavailable, match="needs 4 GPUs"):
        require_devices("cuda", 4)
