"""Another platform, pretended in this process before the project is imported.

Packages of others are imported first, as what they are here; then the system is hidden from
everybody else. `as_windows()`: no module, signal and call that only Unix has. `as_mac(cpu)`: Apple
silicon, without /proc, /sys, the affinity mask and Triton.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import multiprocessing
import os
import platform
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

OTHERS = (
    "asyncio",
    "concurrent.futures",
    "filelock",
    "IPython",
    "matplotlib.pyplot",
    "nbformat",
    "numpy",
    "pandas",
    "papermill",
    "psutil",
    "pyarrow.parquet",
    "pydantic",
    "requests",
    "rich.console",
    "seaborn",
    "subprocess",
    "tempfile",
    "tokenizers",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "tqdm",
    "typer",
    "typer.testing",
    "yaml",
)
UNIX_MODULES = ("fcntl", "grp", "pwd", "resource", "syslog", "termios", "tty")
UNIX_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGKILL", "SIGHUP", "SIGCHLD", "SIGALRM")
UNIX_CALLS = (
    "fork",
    "getpgid",
    "getuid",
    "killpg",
    "pread",
    "sched_getaffinity",
    "setsid",
    "sysconf",
    "uname",
)


def as_windows() -> None:
    _import_others()
    for name in UNIX_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in UNIX_SIGNALS:
        delattr(signal, name)
    for name in UNIX_CALLS:
        delattr(os, name)
    _without_start_methods("fork", "forkserver")
    platform.system = lambda: "Windows"
    platform.machine = lambda: "AMD64"
    # what `shutil.which` asks Windows
    winapi = SimpleNamespace(NeedCurrentDirectoryForExePath=lambda name: True)
    shutil._winapi = winapi  # type: ignore[attr-defined]
    sys.platform = "win32"


def as_mac(machine: str = "arm64") -> None:
    _import_others()
    del os.sched_getaffinity
    _without_files("/proc/", "/sys/")
    _without_packages("triton", "pynvml")
    platform.system = lambda: "Darwin"
    platform.machine = lambda: machine
    platform.processor = lambda: "arm"
    sys.platform = "darwin"


def _import_others() -> None:
    for name in OTHERS:
        importlib.import_module(name)


def _without_start_methods(*names: str) -> None:
    whole = multiprocessing.get_context

    def get_context(method: Any = None) -> Any:
        if method in names:
            raise ValueError(f"cannot find context for {method!r}")
        return whole(method)

    multiprocessing.get_context = get_context  # type: ignore[assignment]


def _of_the_project() -> bool:
    """Whether one of the callers' innermost frames is the project's: libraries stay on the real
    system."""
    frame = sys._getframe(2)
    return any(
        frame is not None and str(frame.f_globals.get("__name__")).startswith("lsai_")
        for frame in (frame, frame.f_back, frame.f_back and frame.f_back.f_back)
    )


def _without_files(*beginnings: str) -> None:
    opened, stat = io.open, os.stat

    def hidden(path: Any) -> bool:
        return (
            isinstance(path, (str, Path)) and str(path).startswith(beginnings) and _of_the_project()
        )

    def open_(file: Any, *arguments: Any, **options: Any) -> Any:
        if hidden(file):
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return opened(file, *arguments, **options)

    def stat_(path: Any, *arguments: Any, **options: Any) -> Any:
        if hidden(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return stat(path, *arguments, **options)

    builtins.open = io.open = open_
    os.stat = stat_


def _without_packages(*names: str) -> None:
    found = importlib.util.find_spec
    for name in names:
        sys.modules[name] = None  # type: ignore[assignment]
    importlib.util.find_spec = lambda name, package=None: (
        None if name.partition(".")[0] in names else found(name, package)
    )
