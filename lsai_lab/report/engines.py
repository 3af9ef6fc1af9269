"""The programs that make the book: Quarto where there is one, else pandoc and typst."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

from lsai_core.base.errors import UserError

Engine = Literal["auto", "quarto", "pandoc"]
HTML, PDF = "index.html", "lab-report.pdf"
RESULTS = {"html": HTML, "pdf": PDF}
LIMIT_S = 300.0  # of pandoc, typst and Quarto, each: the whole book takes some 20 s


def find_quarto(engine: Engine) -> str | None:
    """Quarto on PATH or beside this Python, if wanted and new enough. UserError where it was asked
    for by name."""
    beside = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    quarto = shutil.which("quarto", path=beside) if engine != "pandoc" else None
    version = call(quarto, "--version").strip() if quarto else ""
    if [int(part) for part in re.findall(r"\d+", version)[:2]] >= [1, 9]:
        return quarto
    problem = f"the report needs Quarto 1.9 or newer, found {version or 'none on PATH'}"
    if engine == "quarto":
        raise UserError(f"{problem}; install it, or use --engine pandoc")
    if quarto:
        print(f"report: {problem}; the book is made by pandoc and typst", flush=True)
    return None


def call(*command: object, input: str | None = None, cwd: Path | None = None) -> str:
    """What a program printed. RuntimeError with the end of it if it failed, or did not end within
    `LIMIT_S`."""
    program = Path(str(command[0])).name
    with subprocess.Popen(
        [*map(str, command)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        cwd=cwd,
    ) as process:
        try:
            out, err = process.communicate(input or "", LIMIT_S)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"{program} did not end within {LIMIT_S:.0f} s") from None
            raise
    output = re.sub(r"\x1b\[[0-9;]*m", "", err + out)
    if process.returncode:
        raise RuntimeError(
            f"{program} ended with {process.returncode}: "
            f"{output.strip()[-2000:] or 'no memory left?'}"
        )
    return output
