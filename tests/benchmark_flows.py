"""What `lsai compare`, `lsai claims` and `lsai report` cost with the committed records, and with
ten times as many.

    python tests/benchmark_flows.py [TIMES]

The other records are copies under other machines' names. One line a command: seconds, and how often
as long it takes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from conftest import CHECKOUT

COMMANDS = {
    "compare": ["compare", "memory", "--recorded"],
    "claims": ["claims"],
    "report": ["report", "--no-run"],
    "report, unchanged": ["report", "--no-run"],
    "report, one chapter": ["report", "--chapter", "15-memory"],
}


def measured(times: int) -> dict[str, float]:
    """Seconds of each command in a laboratory with `times` as many records as are committed."""
    with tempfile.TemporaryDirectory() as folder:
        root, reports = Path(folder), Path(folder, "reports")
        for name in ("params", "notebooks"):
            (root / name).symlink_to(CHECKOUT / name)
        ignored = shutil.ignore_patterns("_*", "*.ipynb", "runs", "files", "data")
        shutil.copytree(CHECKOUT / "reports", reports, ignore=ignored)
        for name in ("_brand.yml", "_quarto.yml"):
            shutil.copy(CHECKOUT / "reports" / name, reports)
        machines = [
            path
            for path in (reports / "recorded").iterdir()
            if path.is_dir() and path.name != "predictions"
        ]
        for number in range(1, times):
            for machine in machines:
                shutil.copytree(machine, machine.with_name(f"{machine.name}-copy{number}"))
        environment = {**os.environ, "LSAI_ROOT": folder, "PYTHONPATH": str(CHECKOUT)}
        environment |= {"LSAI_RUNS": str(root / "runs"), "LSAI_DATA": str(root / "data")}
        found = {}
        for name, words in COMMANDS.items():
            begin = time.perf_counter()
            command = [sys.executable, "-m", "lsai_lab.cli", *words]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            # claims that fell are no error of the command
            assert done.returncode in (0, 1), done.stderr
            assert "did not complete" not in done.stdout, done.stdout
            found[name] = time.perf_counter() - begin
        return found


if __name__ == "__main__":
    more = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    one, many = measured(1), measured(more)
    for name, value in one.items():
        print(
            f"{name:19} {value:6.1f} s, with {more} times the records {many[name]:6.1f} s: "
            f"{many[name] / value:.1f} times"
        )
