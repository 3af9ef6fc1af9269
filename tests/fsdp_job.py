"""What four processes do in `test_fsdp.py`: several runs in one job. Started by torchrun:
`fsdp_job.py <folder> <text>`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from fsdp_fixture import config, dataset
from job_end import leave

from lsai_core.parallel.processes import connect
from lsai_core.training.loop import train
from lsai_core.training.sharded_checkpoint import export_hf

RUNS = {
    "fsdp": {"parallel": {"fsdp": 4}, "checkpoint": {"every": 3}},
    "kept": {"parallel": {"fsdp": 4, "reshard_after_forward": False}, "grad_checkpoint": "full"},
    "hsdp": {
        "parallel": {"fsdp": 2, "replicate": 2},
        "grad_checkpoint": "alternating",
        "checkpoint_blocks": 1,
        "eval": {"sequences": 7},
    },
    "offload": {"parallel": {"fsdp": 4, "cpu_offload": True}},
    "tied": {"parallel": {"fsdp": 4}, "grad_accum": 2, "model": {"tie_embeddings": True}},
    "bf16_autocast": {"parallel": {"fsdp": 4}, "precision": "bf16_autocast"},
    "bf16": {"parallel": {"fsdp": 4}, "precision": "bf16"},
    "fp8": {"parallel": {"fsdp": 4}, "precision": "bf16", "fp8": {"recipe": "tensorwise"}},
    "fp8_fused": {
        "parallel": {"fsdp": 4},
        "precision": "bf16",
        "fp8": {"recipe": "fused"},
        "checkpoint": {"every": 3},
    },
}
RUNS["adam8bit"] = {
    "parallel": {"fsdp": 4},
    "optim": {"states": "8bit"},
    "checkpoint": {"every": 3},
}
_GATHER: dict[str, Any] = {"fsdp": 4, "fp8_gather": True}
RUNS["fp8_gather"] = {**RUNS["fp8_fused"], "parallel": _GATHER}
RUNS["fp8_gather_fp32"] = {**RUNS["fp8_gather"], "precision": "bf16_autocast"}
RESUMED = {
    "again": "fsdp",
    "fp8_again": "fp8_fused",
    "fp8_gather_again": "fp8_gather",
    "adam8bit_again": "adam8bit",
}  # the same runs once more, from their checkpoints after step 3


def main(root: Path, text: Path) -> None:
    world = connect(torch.device("cpu"))
    facts = {}
    for name, changes in RUNS.items():
        run, folder = config(text, **changes), root / name
        folder.mkdir(exist_ok=True)
        trained = train(run, dataset(run, root / "data"), folder, world=world)
        export_hf(trained.model, folder / "model", world)
        held = sum(p.to_local().numel() for p in trained.model.parameters())  # type: ignore[attr-defined]
        facts[name] = {
            "validation_loss": trained.validation_loss,
            "held": world.gather(held),
            "dtype": str(next(trained.model.parameters()).dtype),
            "measured": trained.measured,
        }
    for name, first in RESUMED.items():
        run, folder = config(text, **RUNS[first]), root / name
        if world.is_main:
            shutil.copytree(root / first, folder)
        world.barrier()
        again = train(run, dataset(run, root / "data"), folder, world=world)
        export_hf(again.model, folder / "model", world)
        facts[name] = {"resumed_at": again.resumed_at, "validation_loss": again.validation_loss}
    world.close()
    if world.is_main:
        (root / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    leave()
