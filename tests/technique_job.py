"""What `test_add_technique.py` does in a changed copy of the tree: `technique_job.py <folder>
<changes as JSON> <parts>`, or by torchrun."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from job_end import leave

from lsai_core import TrainConfig, predict, train
from lsai_core.base.errors import UserError
from lsai_core.config.strict import deep_merge, validated
from lsai_core.model.hf import save_hf
from lsai_core.model.transformer import count_parameters
from lsai_core.optimizers.build import build_optimizer, kept_states, state_bytes
from lsai_core.parallel.processes import connect
from lsai_core.profiling.memory import PhaseMemory
from lsai_core.training import step
from lsai_core.training.combinations import checked

BASE: dict[str, Any] = {
    "model": {
        "n_layers": 2,
        "d_model": 32,
        "n_heads": 2,
        "n_kv_heads": 1,
        "d_ff": 64,
        "vocab_size": 320,
    },
    "device": "cpu",
    "data": {"vocab_size": 320},
    "seq_len": 32,
    "batch_size": 4,
    "steps": 6,
    "log_every": 1,
    "checkpoint": {"every": 3, "keep": 9},
    "optim": {"lr": 3e-2, "warmup_steps": 1},
    "profile": {"memory_steps": 0, "skip_steps": 1},
    "eval": {"sequences": 4},
}


PHASES = ("forward", "backward", "optimizer")


class Numbers:
    """Tokens that can be learned: they count."""

    def tokens(self, split: str) -> np.ndarray:
        return (np.arange(4000) % 300).astype(np.uint16)


def losses(config: TrainConfig, folder: Path, world: Any = None) -> list[float]:
    folder.mkdir(exist_ok=True)
    return [row["loss"] for row in train(config, Numbers(), folder, world=world).rows]


def measured(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """Of real steps here: GiB of live tensors of the second, in all and by phase, bytes of the
    optimizer's states, and how many parameters there are; and what comes of an export."""
    cpu = torch.device("cpu")
    model = step.prepare_model(config, cpu)
    optimizer = build_optimizer(model, config.optim)
    tokens = torch.randint(config.model.vocab_size, (config.batch_size, config.seq_len + 1))
    meter = PhaseMemory(cpu, [model, optimizer])
    for watching in (None, meter):
        step.train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:], config, cpu, watching)
    try:
        save_hf(model, folder / "exported")
        exported = "written"
    except UserError as error:
        exported = str(error)
    phases = {name: meter.summary()[f"mem_{name}_peak_gib"] for name in PHASES}
    return {
        "peak": meter.summary()["mem_peak_allocated_gib"],
        "phases": phases,
        "states_bytes": sum(state.nbytes for state in kept_states(optimizer)),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "exported": exported,
        "folder": (folder / "exported").exists(),
    }


def searched(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    from lsai_lab.runs.kinds import Context
    from lsai_lab.searches.batch_search import run
    from lsai_lab.searches.config import BatchSearchConfig

    asked = BatchSearchConfig.from_study(row, {"cpu_limit_gib": 1.0, "max_size": 2, "steps": 1})
    config = validated(BatchSearchConfig, asked, "search")
    found = run(config, Context(folder, folder, folder))
    train = config.train
    return {
        "largest": found["largest_batch"],
        "name": train.optim.name,
        "backend": train.attention.backend,
    }


def main(folder: Path, changes: dict[str, Any], parts: list[str]) -> None:
    row = deep_merge(BASE, changes)
    config, answer = checked(TrainConfig, row, "technique"), {}
    if "fsdp" in parts:
        world = connect(torch.device("cpu"))
        config = checked(
            TrainConfig, deep_merge(row, {"parallel": {"fsdp": 2}, "batch_size": 2}), "technique"
        )
        answer["sharded"] = losses(config, folder / "sharded", world)
        if world.is_main:  # which has nothing of the steps after the checkpoint
            shutil.copytree(folder / "sharded", folder / "sharded again")
        world.barrier()
        answer["sharded_resumed"] = losses(config, folder / "sharded again", world)
        world.close()
        if not world.is_main:
            return
    if "train" in parts or "resume" in parts:
        answer["losses"] = losses(config, folder / "run")
        (folder / "again").mkdir()
        for path in [
            *(folder / "run").glob("checkpoint-00000003.*"),
            folder / "run" / "metrics.jsonl",
        ]:
            (folder / "again" / path.name).write_bytes(path.read_bytes())
        try:
            answer["resumed"] = losses(config, folder / "again")
        except UserError as error:
            answer["resumed"] = str(error)
    if "train" in parts:
        answer["states_bytes"] = state_bytes(config.model, config.optim, torch.float32)
        answer["predicted"] = {on: predict(config, on=on).parts for on in ("cpu", "gpu")}
        answer["plain"] = predict(config, "sdpa_math").parts
        answer["predicted_peak"] = predict(config, on="cpu").peak
        answer["predicted_phases"] = predict(config, on="cpu").phases
        answer["counted"] = count_parameters(config.model).total
        answer["measured"] = measured(config, folder)
        answer["searched"] = searched(row, folder)
    (folder / f"{'-'.join(parts)}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3].split(","))
    leave()
