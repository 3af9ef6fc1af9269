"""What the processes of `test_ways.py` do: runs of every way of sharing a model, in one job.
Started by torchrun: `ways_job.py <folder> <text> <names of RUNS, with commas>`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from fsdp_fixture import SEQUENCES, config, dataset
from job_end import leave
from torch import Tensor
from torch.distributed.tensor import DTensor

from lsai_core.config.train import TrainConfig
from lsai_core.model.transformer import Transformer
from lsai_core.parallel.processes import connect
from lsai_core.parallel.rows import out_of_order
from lsai_core.parallel.world import World
from lsai_core.training.loop import train
from lsai_core.training.sharded_checkpoint import export_hf
from lsai_core.training.step import compute_context, loss_fn, own_part, prepare_model

# One step more than a checkpoint lies before the end, in runs that are resumed.
SAVE = {"checkpoint": {"every": 3}}
ODD: dict[str, Any] = {
    "model": {"d_model": 40, "d_ff": 52, "vocab_size": 401, "tie_embeddings": True},
    "seq_len": 36,
    "seed": 3,
}
RUNS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ddp2": {"parallel": {"kind": "ddp", "replicate": 2}, "grad_accum": 2},
        "zero1_2": {"parallel": {"kind": "zero1", "replicate": 2}, "grad_accum": 2},
        "zero2_2": {"parallel": {"kind": "zero2", "fsdp": 2}, "grad_accum": 2},
        "tp2": {"parallel": {"tp": 2}, "grad_accum": 2},
        "pp2": {"parallel": {"pp": 2}, "grad_accum": 4},
    },
    4: {
        "ddp": {"parallel": {"kind": "ddp", "replicate": 4}, **SAVE},
        "ddp_odd": {"parallel": {"kind": "ddp", "replicate": 4}, "grad_accum": 2, **ODD},
        "ddp_full": {
            "parallel": {"kind": "ddp", "replicate": 4},
            "loss": "full",
            "blocks": "plain",
            "grad_checkpoint": "selective",
        },
        "zero1": {"parallel": {"kind": "zero1", "replicate": 4}, **SAVE},
        "zero1_odd": {"parallel": {"kind": "zero1", "replicate": 4}, "grad_accum": 2, **ODD},
        "zero2": {"parallel": {"kind": "zero2", "fsdp": 4}, "grad_accum": 2, **SAVE},
        "zero2_whole": {"parallel": {"kind": "zero2", "fsdp": 4}, **SAVE},
        "zero2_odd": {
            "parallel": {"kind": "zero2", "fsdp": 2, "replicate": 2},
            "grad_accum": 2,
            **ODD,
        },
        "pp": {"parallel": {"pp": 4}, "model": {"n_layers": 5}, "grad_accum": 8, **SAVE},
        "pp_interleaved": {
            "parallel": {"pp": 4, "pp_schedule": "interleaved"},
            "model": {**ODD["model"], "tie_embeddings": False, "n_layers": 8},
            "seq_len": 35,
            "grad_accum": 8,
            "grad_checkpoint": "full",
            **SAVE,
        },
        "pp_fsdp": {"parallel": {"pp": 2, "fsdp": 2}, "grad_accum": 4, **SAVE},
        "pp_fsdp_interleaved": {
            "parallel": {"pp": 2, "fsdp": 2, "pp_schedule": "interleaved"},
            "model": {**ODD["model"], "tie_embeddings": False, "n_layers": 5},
            "seq_len": 35,
            "grad_accum": 4,
            "grad_checkpoint": "full",
            **SAVE,
        },
        "tp": {"parallel": {"tp": 4}, "model": {"n_kv_heads": 4}, **SAVE},
        "tp_plain": {
            "parallel": {"tp": 4},
            "model": {"n_kv_heads": 4},
            "blocks": "plain",
            "grad_checkpoint": "selective",
        },
        "tp_fsdp": {"parallel": {"fsdp": 2, "tp": 2}, **SAVE},
        "tp_fsdp_odd": {"parallel": {"fsdp": 2, "tp": 2}, "grad_accum": 2, **ODD},
        "cp_tp": {"parallel": {"cp": 2, "tp": 2}, **SAVE},
        "cp_tp_heads": {
            "parallel": {"cp": 2, "tp": 2, "cp_method": "ulysses"},
            "grad_accum": 2,
            **ODD,
        },
        "tp_zero2": {
            "parallel": {"kind": "zero2", "fsdp": 2, "tp": 2},
            "grad_checkpoint": "full",
            "grad_accum": 2,
        },
    },
}
RUNS[8] = {
    "tp_hsdp": {"parallel": {"fsdp": 2, "replicate": 2, "tp": 2}},
    "cp_tp_fsdp": {"parallel": {"fsdp": 2, "cp": 2, "tp": 2}},
    "pp_hsdp": {"parallel": {"fsdp": 2, "replicate": 2, "pp": 2}, "grad_accum": 2},
}
STEPS = 20
# From the checkpoints after step 18 of these runs go on, as other ways and numbers of processes.
RESUMED: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        "fsdp2_of_ddp": ("ddp", {"fsdp": 2}),
        "tp2_of_fsdp": ("tp_fsdp", {"tp": 2}),
        "fsdp2_of_pp": ("pp_fsdp", {"fsdp": 2}),
        "cp2_of_cp_tp": ("cp_tp", {"cp": 2}),
        "zero1_of_tp": ("tp_fsdp", {"kind": "zero1", "replicate": 2}),
    },
    4: {
        "tp_of_ddp": ("ddp", {"fsdp": 2, "tp": 2}),
        "ddp_of_tp": ("tp_fsdp", {"kind": "ddp", "replicate": 4}),
        "fsdp_of_zero1": ("zero1", {"fsdp": 4}),
        "cp_tp_of_pp": ("pp_fsdp", {"cp": 2, "tp": 2}),
        "tp_of_zero1": ("zero1", {"fsdp": 2, "tp": 2}),
        "pp_of_zero2": ("zero2", {"fsdp": 2, "pp": 2}),
        "zero1_of_zero2": ("zero2_whole", {"kind": "zero1", "replicate": 4}),
    },
}


def run_of(text: Path, name: str) -> TrainConfig:
    """The run `name`, of 20 steps, by the processes that its settings say."""
    changes = next(runs[name] for runs in RUNS.values() if name in runs)
    return config(text, **{"steps": STEPS, "optim": {"lr": 1e-3, "grad_clip": 0.5}, **changes})


def other_run(text: Path, size: int, name: str) -> TrainConfig:
    """The run that goes on from another's checkpoint, over as many sequences a step."""
    first, parallel = RESUMED[size][name]
    changes = {**RUNS[4][first], "parallel": parallel}
    return config(text, **{"steps": STEPS, "optim": {"lr": 1e-3, "grad_clip": 0.5}, **changes})


def gradients(run: TrainConfig, world: World) -> tuple[dict[str, Tensor], Tensor]:
    """The whole gradients of the mean loss over the first `SEQUENCES` random sequences, by name,
    and that loss."""
    model = prepare_model(run, torch.device("cpu"))
    x_NS, y_NS = random_tokens(run)
    reader = world.rank * run.parallel.readers // world.size
    each = SEQUENCES // run.parallel.readers
    own = slice(reader * each, (reader + 1) * each)
    x_NS, y_NS = own_part(model, x_NS[own], y_NS[own])
    with model.micro_batch(True), compute_context(run, torch.device("cpu")):
        if model.pipeline is not None:
            loss = model.pipeline(x_NS, y_NS)
        else:
            loss = loss_fn(model, x_NS, y_NS, run)
            loss.backward()
    found = whole_gradients(model)
    if model.pipeline is not None:  # each process has its own parameters
        found = {name: grad for part in world.gather(found) for name, grad in part.items()}
    return found, world.mean(loss.detach())


def random_tokens(run: TrainConfig) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(run.seed)
    shape = (SEQUENCES, run.seq_len + 1)
    tokens = torch.randint(run.model.vocab_size, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def whole_gradients(model: Transformer) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
        found[name] = out_of_order(whole, model.row_order(name))
    return found


def main(root: Path, text: Path, names: list[str]) -> None:
    world = connect(torch.device("cpu"))
    facts: dict[str, Any] = {}
    for name in [name for name in names if name in RESUMED.get(world.size, {})]:
        run, folder = other_run(text, world.size, name), root / name
        first, _ = RESUMED[world.size][name]
        facts[name] = again(run, root / first, folder, world)
    for name in [name for name in names if name in RUNS[world.size]]:
        run, folder = run_of(text, name), root / name
        folder.mkdir(exist_ok=True)
        found, loss = gradients(run, world)
        if world.is_main:
            torch.save({"gradients": found, "loss": loss}, folder / "gradients.pt")
        trained = train(run, dataset(run, root / "data"), folder, world=world)
        export_hf(trained.model, folder / "model", world)
        facts[name] = {"validation_loss": trained.validation_loss}
        if run.checkpoint.every:
            facts[name] |= again(run, folder, root / f"{name}_again", world)
    world.close()
    if world.is_main:
        (root / f"facts{world.size}.json").write_text(json.dumps(facts))


def again(run: TrainConfig, first: Path, folder: Path, world: World) -> dict[str, Any]:
    """What goes on from the last checkpoint of the run in `first`, in another folder."""
    if world.is_main:
        shutil.copytree(first, folder)
    world.barrier()
    trained = train(run, dataset(run, folder.parent / "data"), folder, world=world)
    export_hf(trained.model, folder / "model", world)
    return {"resumed_at": trained.resumed_at, "resumed_loss": trained.validation_loss}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","))
    leave()
