"""What the processes of `test_context_training.py` do: `context_training_job.py <folder> <text>`,
started by torchrun.

Every run whose number of processes is that of the job, by the trainer itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from fsdp_fixture import METERED, config, dataset
from job_end import leave

from lsai_core.context import METHODS
from lsai_core.parallel.processes import connect
from lsai_core.training.loop import train
from lsai_core.training.sharded_checkpoint import export_hf

STEPS = 20
METHODS_OF_OURS = [name for name, method in METHODS.items() if not method.peer]
LEAN = {"grad_checkpoint": "attention", "saved_inputs": "host", "mlp_chunk": 10}


def run(
    cp: int = 2, method: str = "zigzag", fsdp: int = 1, replicate: int = 1, **changes: Any
) -> dict[str, Any]:
    return {
        "steps": STEPS,
        "parallel": {"fsdp": fsdp, "replicate": replicate, "cp": cp, "cp_method": method},
        **changes,
    }


RUNS: dict[str, dict[str, Any]] = {
    **{f"{method}-{cp}": run(cp, method) for cp in (2, 4) for method in METHODS_OF_OURS},
    "stopped": run(checkpoint={"every": 12}),
    "sharded": run(fsdp=2, grad_accum=2, eval={"sequences": 3}),
    "replicated": run(replicate=2, grad_checkpoint="selective"),
    "tied": run(method="usp", model={"tie_embeddings": True}, **LEAN),
    "lean": run(4, **LEAN),
    "full": run(4, "lightseq", grad_checkpoint="full", attention={"window": 12}),
    "bf16": run(precision="bf16", **LEAN),
    "compiled": run(method="usp", compile=True, **LEAN),
}


def main(root: Path, text: Path) -> None:
    world = connect(torch.device("cpu"))
    facts = {}
    for name, changes in RUNS.items():
        chosen, folder = config(text, **changes, profile=METERED), root / name
        if chosen.parallel.world_size != world.size:
            continue
        folder.mkdir(exist_ok=True)
        trained = train(chosen, dataset(chosen, root / "data"), folder, world=world)
        export_hf(trained.model, folder / "model", world)
        held = sum(p.to_local().numel() for p in trained.model.parameters())  # type: ignore[attr-defined]
        facts[name] = {
            "validation_loss": trained.validation_loss,
            "held": world.gather(held),
            "kernel": trained.attention_kernel,
            "peak_gib": trained.measured["mem_peak_allocated_gib_mean"],
        }
    world.close()
    if world.is_main:
        (root / f"facts-{world.size}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    leave()
