"""Slurm's own commands: submit, ask, cancel. A refusal becomes one `UserError` line with Slurm's
reason in it.

States come from `scontrol show job`, which needs no accounting and knows a job until some minutes
(MinJobAge) after its end.
"""

import re
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass

from lsai_core.base.errors import UserError

# States of a job that will not run again by itself (man squeue, JOB STATE CODES).
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"}
ENDED |= {"OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"}
_SECONDS = 60.0


@dataclass(frozen=True)
class JobState:
    """What the controller says of one job or array task. `elapsed` is Slurm's
    [days-]hours:minutes:seconds."""

    job: str
    task: int | None
    state: str
    elapsed: str
    exit_code: str
    restarts: int
    reason: str

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def _call(
    program: str, *arguments: str, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    if shutil.which(program) is None:
        ways = (
            "submit from a login node of the cluster, see the script with --dry-run, or run "
            "here with `lsai study`"
        )
        raise UserError(f"no {program} on this machine: {ways}")
    try:
        return subprocess.run(
            [program, *arguments], input=text, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{program} gave no answer within {_SECONDS:g} s: is the Slurm controller running?"
        ) from None


def available() -> bool:
    """True if Slurm's commands are on this machine."""
    return shutil.which("sbatch") is not None


def require() -> None:
    """Raise UserError if there is no `sbatch`."""
    if not available():
        _call("sbatch")


def require_step_options(options: list[str]) -> None:
    """Raise UserError if `srun` does not know an option, which a site's plugin brings."""
    told = _call("srun", *options, "--help").stderr
    if unknown := re.search(r"unrecognized option '?(--[\w-]+)", told):
        keys = "`environment`, `container_image` and `step`"
        lacks = f"srun of this cluster lacks the plugin for {unknown[1]}"
        raise UserError(f"{lacks} (see {keys} in its file)")


def sbatch(script: str, test_only: bool = False) -> str:
    """Submit a script and return the job's id, or only ask whether the cluster could ever run it.
    Raises UserError if it is refused."""
    done = _call("sbatch", "--test-only" if test_only else "--parsable", text=script)
    may_wait = test_only and ("busy" in done.stderr or "not available now" in done.stderr)
    if done.returncode and not may_wait:
        verb = "refuses" if test_only else "refused"
        raise UserError(f"Slurm {verb} the job: {_reason(done.stderr)}{_hint(done.stderr)}")
    return "" if test_only else done.stdout.strip().splitlines()[-1].split(";")[0]


def _reason(text: str) -> str:
    lines = [
        line.strip() for line in text.splitlines() if line.strip() and not line.startswith("Try ")
    ]
    known = dict.fromkeys(
        re.sub(r"^(\w+: (error|fatal)|sbatch|allocation failure): ", "", line) for line in lines
    )
    return "; ".join(list(known)[-3:]) or "it gave no reason"


def _hint(text: str) -> str:
    if "partition" in text.lower():
        known = _call("sinfo", "-h", "-o", "%P")
        names = sorted({name.rstrip("*") for name in known.stdout.split()})
        return f"; partitions here: {', '.join(names)}" if names else ""
    if "unrecognized option" in text:
        return "; this cluster lacks the plugin for it (see `sbatch` in its file)"
    return ""


def show(job: str) -> list[JobState]:
    """The job's state, one entry for each array task; empty if it is forgotten. Raises UserError if
    the controller does not answer."""
    done = _call("scontrol", "--oneliner", "show", "job", job)
    if done.returncode:
        if "Invalid job id" in done.stderr:
            return []
        raise UserError(f"Slurm does not answer: {_reason(done.stderr)}")
    return [_parse(line) for line in done.stdout.splitlines() if line.startswith("JobId=")]


def _parse(line: str) -> JobState:
    fields = defaultdict(str, re.findall(r"(?:^| )([A-Za-z]+)=(\S*)", line))
    task, state = fields["ArrayTaskId"], fields["JobState"].rstrip("+")
    return JobState(
        fields["JobId"],
        int(task) if task.isdigit() else None,
        state,
        fields["RunTime"],
        fields["ExitCode"],
        int(fields["Restarts"] or 0),
        fields["Reason"],
    )


def cancel(*jobs: str) -> None:
    """Cancel jobs (an array's id cancels all of its tasks). Raises UserError if Slurm refuses."""
    if jobs and (done := _call("scancel", *jobs)).returncode:
        raise UserError(f"Slurm did not cancel {', '.join(jobs)}: {_reason(done.stderr)}")
