"""Does a plan hold? Tasks for `lsai plan`, drawn first, planned on any machine, run on a GPU.

    python tests/plan_tasks.py --draw              writes reports/predictions/plan_tasks.json
    python tests/plan_tasks.py --plan PLANS        plans them (under a minute each), a line each;
                                                   goes on where it stopped; --workers 16
    python tests/plan_tasks.py --measure PLANS OUT --seconds 500    on a GPU: runs each plan with
                                                   its budget as the process's cap, and writes
                                                   budget, peak reserved and outcome; as many at a
                                                   time as --together-gib of it hold
    python tests/plan_tasks.py --table OUT         how many ran within their budget, how full

A task is a shape, a sequence length, the tokens of a step and the GiB that PyTorch may reserve
(`set_per_process_memory_fraction`). Budgets lie between what the smallest states that are allowed
need, with something for activations, and half as much again as fp32 states need.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from verify_predictions import TOGETHER_GIB, measure, shape

from lsai_core.base.files import read_jsonl, write_text
from lsai_core.config.model import ModelConfig
from lsai_core.model.transformer import count_parameters
from lsai_core.profiling.gpus import find_gpu
from lsai_lab.predictions.asked import Source
from lsai_lab.predictions.plan import make_plan
from lsai_lab.predictions.plan_predicted import Room

TASKS = Path(__file__).parents[1] / "reports" / "predictions" / "plan_tasks.json"
COUNT, SEED = 200, 43
LEAST_GIB, MOST_GIB = 4.0, 72.0
GIB = 2**30


def draw(seed: int = SEED, count: int = COUNT) -> list[dict[str, Any]]:
    """`count` tasks, the same ones for the same seed."""
    dice, tasks = random.Random(seed), list[dict[str, Any]]()
    while len(tasks) < count:
        model = shape(dice, [8, 12, 16, 24, 32], (4, 32))  # 0.05 to 7 B parameters
        size = count_parameters(ModelConfig.model_validate(model)).total / GIB
        numerics = dice.choice(["harmless", "harmless", "fp8", "fp32"])
        kept_gib = (16 if numerics == "fp32" else 6) * size
        least, most = max(LEAST_GIB, 1.25 * kept_gib + 2), min(MOST_GIB, 24 * size + 4)
        if least >= most:
            continue
        seq_len = dice.choice([512, 1024, 2048, 4096, 8192])
        # More than fits at once, and a step of seconds: a larger model gets fewer.
        tokens = 2 ** (dice.choice([15, 16, 17]) - (size > 2) - (size > 4))
        sequences = max(2, tokens // seq_len) * dice.choice([2, 3]) // 2
        tasks.append(
            {
                "name": f"task-{len(tasks)}",
                "model": model,
                "seq_len": seq_len,
                "tokens": sequences * seq_len,
                "budget_gib": round(math.exp(dice.uniform(math.log(least), math.log(most))), 2),
                "numerics": numerics,
            }
        )
    return tasks


def planned(task: dict[str, Any]) -> dict[str, Any]:
    """The plan of a task for one H100, as a row of `verify_predictions`."""
    overrides = {"seq_len": task["seq_len"], "model": task["model"]}
    config = Source(model="lab").run("h100", None, overrides).config
    room = Room(find_gpu("h100"), task["budget_gib"])
    plan = make_plan(config, task["tokens"], room, allowed=task["numerics"], packages="none")
    found = plan.chosen
    if found is None or plan.offloaded:
        return task | {"settings": None}
    settings = found.config.model_dump(mode="json") | {"device": "cuda"}
    if found.attention is not None:
        settings["attention"]["backend"] = found.attention
    return task | {
        "settings": settings,
        "expandable": False,
        "cap_gib": task["budget_gib"],
        "predicted": {
            "active_gib": found.peak_gib,
            "reserved_gib": found.reserved_gib,
            "step_s": found.step_s,
            "words": found.words,
        },
    }


def plan_all(path: Path, workers: int) -> None:
    """Add the plans that `path` lacks, a line each."""
    done = {row["name"] for row in read_jsonl(path)} if path.exists() else set()
    tasks = json.loads(TASKS.read_text(encoding="utf-8"))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        asked = [pool.submit(planned, task) for task in tasks if task["name"] not in done]
        for answer in as_completed(asked):
            row = answer.result()
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            words = row["predicted"]["words"] if row["settings"] else "nothing fits its GPU memory"
            print(row["name"], words, flush=True)


def measure_all(path: Path, out: Path, seconds: float, together_gib: float) -> None:
    """Run the plans of `path`, several at a time, and write what became of each to `out`."""
    rows = [row for row in read_jsonl(path) if row["settings"]]
    runnable = out.with_suffix(".plans.jsonl")
    write_text(runnable, "".join(json.dumps(row) + "\n" for row in rows))
    measure(runnable, out, seconds, together_gib)


def table(out: Path) -> dict[str, Any]:
    """How many plans ran within their budget, and the median share of it that they reserved."""
    rows = [row for row in read_jsonl(out) if "measured" in row]
    held = [row for row in rows if row["measured"]["fits"]]
    filled = [row["measured"]["reserved_gib"] / row["budget_gib"] for row in held]
    return {
        "ran": len(rows),
        "within budget": len(held) / max(1, len(rows)),
        "median fill": statistics.median(filled) if filled else None,
    }


def main() -> None:
    """One of the commands above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--measure", type=Path, nargs=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--together-gib", type=float, default=TOGETHER_GIB)
    parser.add_argument("--table", type=Path)
    asked = parser.parse_args()
    if asked.draw:
        lines = ",\n".join(json.dumps(task, separators=(",", ":")) for task in draw())
        write_text(TASKS, f"[\n{lines}\n]\n")
    if asked.plan:
        plan_all(asked.plan, asked.workers)
    if asked.measure:
        plans, out = asked.measure
        measure_all(plans, out, asked.seconds, asked.together_gib)
    if asked.table:
        print(json.dumps(table(asked.table), indent=1))


if __name__ == "__main__":
    main()
