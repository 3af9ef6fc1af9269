"""What a run costs beside its steps: `python tests/benchmark_overhead.py [--gpu]` prints the
seconds as one JSON line.

Four runs of a few steps in one command, as a study makes them. `outside`: what the command adds to
a run's own time (process, imports, kernel, plan, notebook, record); `inside`: what the run itself
does beside its steps (model, data, evaluation, checks of its inputs). The first run of a command
also waits for what all later ones are forked from, so it is stated apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="the sizes of this machine's GPU instead of the smallest ones",
    )
    profile = [] if parser.parse_args().gpu else ["--profile", "quick"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "LSAI_RUNS": folder, "LSAI_ROOT": str(ROOT)}
        command = [
            sys.executable,
            "-m",
            "lsai_lab.cli",
            "study",
            "memory",
            "--parts",
            "train",
            *profile,
            "--set",
            "steps=12",
        ]
        only = ["--only", "baseline,bf16,flash_attn,flash_gradcp"]
        rows = []
        with subprocess.Popen(
            [*command, *only], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout or ():
                rows.append((time.time(), line))
        began = [at for at, line in rows if "started" in line]
        ended = [at for at, line in rows if " ok, " in line]
        if process.returncode or not len(began) == len(ended) == RUNS:
            sys.exit("".join(line for _, line in rows) or f"exit code {process.returncode}")
        summaries = [
            json.loads(path.read_text(encoding="utf-8"))
            for path in Path(folder).glob("*/*/summary.json")
        ]
        walls = {
            summary["id"]["variant"]: (summary["wall_s"], summary["results"]["train_s"])
            for summary in summaries
        }
        names = [line.split("memory.")[1].split()[0] for _, line in rows if "started" in line]
        outside = [
            other - one - walls[name][0]
            for one, other, name in zip(began, ended, names, strict=True)
        ]
        inside = [walls[name][0] - walls[name][1] for name in names]
        later = {
            "outside_s": statistics.median(outside[1:]),
            "inside_s": statistics.median(inside[1:]),
        }
        found = {"first_outside_s": outside[0], "first_inside_s": inside[0], **later, "n": RUNS - 1}
        print(json.dumps({name: round(value, 2) for name, value in found.items()}))


if __name__ == "__main__":
    main()
