"""One process of a peer's run, of those that a launcher watches or started by hand, with its output
where it was started: `LSAI_PEER=<folder> python -m lsai_lab.peers.worker <the peer's own options>`.
"""

import importlib
import os
import signal
from functools import partial

from lsai_core.base.errors import Preempted
from lsai_lab.launch.launch import LAUNCHER
from lsai_lab.peers.watch import Job
from lsai_lab.runs.worker import as_worker


def train(job: Job) -> None:
    """Do the job."""
    signal.signal(signal.SIGUSR1, stop)
    importlib.import_module(job.adapter).train(job)


def stop(_number: int, _frame: object) -> None:
    """The launcher's stop signal: another trainer's run begins anew the next time."""
    raise Preempted("stopped by a signal")


if __name__ == "__main__":
    job = Job()
    if LAUNCHER in os.environ:
        as_worker(job.run_folder, partial(train, job))
    train(job)
