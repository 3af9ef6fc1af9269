"""One process of a peer's run: `LSAI_PEER=<folder> python -m lsai_lab.peers.worker <the peer's own options>`.

It calls the training of the framework that `job.json` names. If that raises, already when it is imported, the process notes what
and when in `rank-<N>.error.json` and leaves at once, without the farewells that could wait for another process.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
import traceback

from lsai_core.files import write_json
from lsai_lab.launch.worker import leave_with_launcher
from lsai_lab.peers.watch import Job

_TRAINING = {"hf": "lsai_lab.peers.hf_train", "torchtitan": "lsai_lab.peers.titan_train"}


def main() -> None:
    """Do the job; never returns if it fails."""
    job = Job()
    threading.Thread(target=leave_with_launcher, daemon=True).start()
    try:
        importlib.import_module(_TRAINING[job.config.framework]).train(job)
    except Exception as error:
        from lsai_lab.runs.outcome import outcome_of

        traceback.print_exc()
        outcome, reason = outcome_of(error)
        facts = {"time": time.time(), "rank": job.rank, "outcome": outcome, "reason": reason}
        write_json(job.folder / f"rank-{job.rank}.error.json", facts)
        sys.stdout.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
