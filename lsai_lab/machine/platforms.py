"""Where the laboratory runs: supported, best effort, or refused in one line.

`make` asks this file before anything is installed, with whatever Python there is, so it needs the
standard library and the syntax of Python 3.6 only. README has the table of it.
"""

import platform
import sys

OLDEST_PYTHON = (3, 11)
TESTED_PYTHON = ((3, 11), (3, 14))
SUPPORTED = {("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")}


def no_runs_here() -> "str | None":
    """Why nothing can be executed on this system; None if it can. Records are read everywhere."""
    if sys.platform == "win32":
        return "native Windows cannot execute runs; use WSL2: `wsl --install`, then the same there"
    return None


def refusal() -> "str | None":
    """Why the laboratory cannot be installed here, with what to do; None if it can."""
    if sys.platform == "win32":
        return no_runs_here()
    if sys.platform == "darwin" and platform.machine() == "x86_64":
        no_torch = "there is no PyTorch 2.11 or newer for Intel Macs"
        return f"{no_torch}; on Apple silicon use a Python built for arm64, else a Linux machine"
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        found = platform.python_version()
        return f"Python {oldest} or newer is needed, found {found}; set PYTHON=..."
    return None


def standing() -> str:
    """`supported`, or `best effort` with the reason."""
    if (sys.platform, platform.machine()) not in SUPPORTED:
        return f"best effort: {platform.system()} on {platform.machine()} is untested"
    if not TESTED_PYTHON[0] <= sys.version_info[:2] <= TESTED_PYTHON[1]:
        tested = " to ".join(".".join(map(str, version)) for version in sorted({*TESTED_PYTHON}))
        return f"best effort: tested with Python {tested}"
    return "supported"


if __name__ == "__main__":
    problem = refusal()
    if problem is not None:
        sys.exit(f"error: {problem}")
