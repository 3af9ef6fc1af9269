"""What `lsai compare` and the run pages of `lsai report` cost with many records: seconds, and how they grow from N runs to 10 N.

python tests/benchmark_flows.py [N]

"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from conftest import CHECKOUT, write_run

from lsai_lab.kit.runpages import write_run_pages
from lsai_lab.runs.records import find_runs

COMMANDS = {"compare": ["compare", "memory", "--all"]}


def seconds(root: Path, words: list[str]) -> float:
    environment = {**os.environ, "LSAI_ROOT": str(CHECKOUT), "LSAI_RUNS": str(root), "PYTHONPATH": str(CHECKOUT)}
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "lsai_lab.cli", *words], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return time.perf_counter() - begin


def measured(count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        runs, reports = Path(folder, "runs"), Path(folder, "reports")
        metrics = [{"step": step, "loss": 5.0 - step / 100, "tokens_per_s": 100.0} for step in range(100)]
        for number in range(count):
            results = {"tokens_per_s": 100.0 + number, "loss": 3.0}
            write_run(runs, "memory", f"v{number}", results=results, config={"steps": 100}, metrics=metrics)
        found = {name: seconds(runs, words) for name, words in COMMANDS.items()}
        reports.mkdir()
        for path in (CHECKOUT / "reports").glob("*.html"):
            (reports / path.name).write_text(path.read_text())
        begin = time.perf_counter()
        write_run_pages(find_runs(runs), reports)
        return {**found, "report: run pages": time.perf_counter() - begin}


if __name__ == "__main__":
    few = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    first, second = measured(few), measured(10 * few)
    for name, value in first.items():
        print(
            f"{name:18} {few} runs {value:6.2f} s, {10 * few} runs {second[name]:6.2f} s: {second[name] / value:.1f} times"
        )
