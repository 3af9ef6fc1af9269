"""Starting a peer's processes, following their log, and saying in one line how they ended.

The caller holds no GPU and keeps no state of the peer: all of it lives and dies with the processes, whose output is kept in
`peer.log`. Whatever ends them is raised as what it was, so that the run's outcome says it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lsai_core.errors import Unavailable
from lsai_lab.launch.launch import LAUNCHER, kill_family, on_this_machine
from lsai_lab.peers.watch import FOLDER, STEP_LINE

_POLL_S = 0.2
_STEP = re.compile(rf"^{re.escape(STEP_LINE)} (\d+) of ", re.M)
# Nothing is looked for on the network, and no cache outside of the run's folder is written.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class PeerFailed(Exception):
    """The peer's process ended without results; the message says how, in one line."""


def run_process(
    words: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    log: Path,
    *,
    processes: int = 1,
    on_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """Run `words` to the end with `folder` as the job's folder; returns the results that it wrote there.

    `on_step` gets the number of steps that are queued, as the log tells it. Raises MemoryError, Unavailable or PeerFailed.
    """
    package = Path(__file__).resolve().parents[2]
    environment = {
        **on_this_machine(),
        **_OFFLINE,
        **variables,
        "HF_HOME": str(folder / "cache"),
        # The package may be found by the folder that the caller was started in only.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        FOLDER: str(folder),
        LAUNCHER: f"{os.getpid()}@{socket.gethostname()}",
    }
    if processes == 1:  # a trainer that sees more GPUs may use them
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            told = 0
            while process.poll() is None:
                queued = max(map(int, _STEP.findall(_end_of(log))), default=0)
                if queued > told:
                    on_step(told := queued)
                time.sleep(_POLL_S)
        finally:
            kill_family(process)
    if process.returncode == 0 and (folder / "results.json").exists():
        return json.loads((folder / "results.json").read_text(encoding="utf-8"))
    raise _cause(folder, log, process.returncode)


def shown_command(words: Sequence[str], variables: Mapping[str, str], folder: Path) -> str:
    """The command line as a reader may repeat it: `$RUN` for the run's folder, no path of this machine."""
    given = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    line = shlex.join(["python" if word == sys.executable else word for word in words])
    return " ".join([*given, f"{FOLDER}=$RUN/{folder.name}", line.replace(str(folder.parent), "$RUN")])


def _end_of(log: Path, size: int = 20_000) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - size))
        return file.read().decode(errors="replace")


def _cause(folder: Path, log: Path, code: int) -> Exception:
    """What ended the process. The earliest error of its processes is the cause, the others are its echo."""
    errors = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank-*.error.json")]
    first = min(errors, key=lambda error: error["time"], default=None)
    if first is not None:
        kinds: dict[str, type[Exception]] = {"oom": MemoryError, "unavailable": Unavailable}
        return kinds.get(first["outcome"], PeerFailed)(first["reason"])
    if code < 0:
        hint = " (by hand, or by the system when memory ran out)" if code == -signal.SIGKILL else ""
        return PeerFailed(f"the process was ended by {signal.Signals(-code).name}{hint}; see {log.name}")
    lines = [line.strip() for line in _end_of(log).splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)), "")
    return PeerFailed(f"the process ended with exit code {code}: {last or (lines[-1] if lines else 'no output')}"[:400])
