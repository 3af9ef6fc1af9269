"""A real Slurm on this machine, for tests: one slurmctld and two slurmd nodes with four fake GPUs
each, as plain processes.

No systemd, no cgroups, no accounting, nothing installed: the session starts it in a folder of its
own and ends every process it started. It needs Slurm's programs and root (slurmd refuses others);
`why_not()` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "sinfo", "squeue")
NODES = ("n1", "n2")
GPUS = 4

# Stands in for a site's container plugin, as `srun` before the real one on the PATH. It writes down
# each call (where it came from, then its words), takes the container's options away and tells the
# step that it is inside. From inside, srun does not work, as in a real container.
_CONTAINER = """\
#!/bin/bash
here=$(dirname "$0")
{ printf '%q ' "${IN_CONTAINER:-host}" "$@"; echo; } >> "$here/calls"
if [ -n "$IN_CONTAINER" ]; then
  echo "srun: fatal: Can't find plugin for switch/hpe_slingshot" >&2
  exit 1
fi
PATH=${PATH#"$here:"}
options=()
container=
while [[ $1 == -* ]]; do
  case $1 in
    --help) exit 0 ;;
    --environment=* | --container-image=*) container=${1#*=} ;;
    --container-*) ;;
    *) options+=("$1") ;;
  esac
  shift
done
exec srun "${options[@]}" env "IN_CONTAINER=$container" "PATH=$here:$PATH" "$@"
"""

_CONFIG = """\
ClusterName=ci
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PlugStackConfig={folder}/plugstack.conf
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MinJobAge=3600
RequeueExit=99
GresTypes=gpu
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] \
    CPUs=64 RealMemory=2000 Gres=gpu:{gpus}
PartitionName=normal Nodes=ALL Default=YES MaxTime=60
"""


def why_not() -> str | None:
    """The reason why no test cluster can be started here; None if it can."""
    os.environ["PATH"] = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian keeps the daemons
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return (
            f"Slurm is not installed (no {', '.join(missing)}); on Debian: slurmctld slurmd "
            f"slurm-client"
        )
    return None if os.geteuid() == 0 else "slurmd needs root"


def container_stand_in(folder: Path) -> Path:
    """Make a folder to be put before the PATH; its `calls` will hold every call of srun."""
    folder.mkdir(parents=True)
    (folder / "srun").write_text(_CONTAINER)
    (folder / "srun").chmod(0o755)
    return folder


def _three_free_ports() -> int:
    """The first of three ports in a row that nobody listens on."""
    for first in range(21000, 29000, 7):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + 3):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise RuntimeError("no three free ports in a row")


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[None]:
    """Start the cluster in `folder` and set SLURM_CONF; cancels what is left and stops every daemon
    at the end."""
    for name in ("state", "spool/n1", "spool/n2", "dev"):
        (folder / name).mkdir(parents=True)
    (folder / "plugstack.conf").touch()
    for number in range(GPUS):
        os.mknod(folder / f"dev/gpu{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/dev/gpu[0-{GPUS - 1}]\n")
    port, host = _three_free_ports(), socket.gethostname().split(".")[0]
    config = _CONFIG.format(
        folder=folder, host=host, port=port, first=port + 1, last=port + 2, gpus=GPUS
    )
    (folder / "slurm.conf").write_text(config)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    daemons = []
    try:
        for command in (["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)):
            daemons.append(
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
        _wait_until_idle(folder)
        yield
        _cancel_all()
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before


def _wait_until_idle(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        seen = subprocess.run(["sinfo", "-hN", "-o", "%T"], capture_output=True, text=True)
        if seen.stdout.split() == ["idle"] * len(NODES):
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-1500:] for path in sorted(folder.glob("*.log")))
    raise RuntimeError(f"the test cluster did not start:\n{logs}")


def _cancel_all() -> None:
    subprocess.run(["scancel", "--user=root"], capture_output=True)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout.strip():
            return
        time.sleep(0.3)
