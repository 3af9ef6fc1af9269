"""Ask the batch script for a step over several nodes: `python -m ... <srun options> -- <command>`.

The study of a job with a container runs in it, where srun does not work. The script on the host
looks into $LSAI_STEPS (envs/job.sbatch.j2): a file `<name>.asked` holds the step's words, with NUL
between them; `<name>.code` appears when the step has ended, `<name>.out` holds what srun said, and
`<name>.USR1` asks for that signal to be passed on. This process waits as srun would: its exit code
and its output are the step's.
"""

import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

STEPS = "LSAI_STEPS"
# What the caller has set for the workers beside the project's own variables (LSAI_...).
_CARRIED = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONUNBUFFERED")
_POLL_S = 0.2


def words_of(arguments: list[str], environment: Mapping[str, str], folder: str) -> list[str]:
    """The words behind `srun` for `<srun options> -- <command>`.

    The step begins from the environment of the batch script, so that what was set since then goes
    along; the command starts in `folder`.
    """
    at = arguments.index("--")
    carried = [
        f"{name}={value}"
        for name, value in sorted(environment.items())
        if name in _CARRIED or (name.startswith("LSAI_") and name != STEPS)
    ]
    return [*arguments[:at], "env", f"--chdir={folder}", *carried, *arguments[at + 1 :]]


def main(arguments: list[str]) -> int:
    """Ask for the step and wait for its end; returns its exit code."""
    asked = Path(os.environ[STEPS]) / uuid.uuid4().hex[:12]
    signal.signal(signal.SIGUSR1, lambda *_: asked.with_suffix(".USR1").touch())
    text = "\0".join([*words_of(arguments, os.environ, os.getcwd()), ""])
    part = asked.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.rename(asked.with_suffix(".asked"))
    while not asked.with_suffix(".code").exists():
        time.sleep(_POLL_S)
    sys.stdout.write(asked.with_suffix(".out").read_text(encoding="utf-8", errors="replace"))
    sys.stdout.flush()
    return int(asked.with_suffix(".code").read_text(encoding="ascii"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
