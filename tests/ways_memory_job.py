"""What the processes of `test_predict_ways.py` measure: the live bytes of a step of every way of
sharing a model. Started by torchrun: `ways_memory_job.py <file> <names of WAYS, with commas>`."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from job_end import leave
from torch import Tensor
from torch.distributed.tensor import DTensor

from lsai_core.config.strict import deep_merge
from lsai_core.config.train import TrainConfig
from lsai_core.optimizers.build import clip_and_update, kept_states, make_states
from lsai_core.parallel.processes import connect
from lsai_core.parallel.world import World
from lsai_core.profiling.live_tensors import LiveTensors
from lsai_core.training.combinations import checked
from lsai_core.training.step import prepare_model, prepare_optimizer, train_step

# Of sizes that nothing divides but what must, so that ranks differ.
BASE: dict[str, Any] = {
    "model": {
        "n_layers": 5,
        "d_model": 40,
        "n_heads": 4,
        "n_kv_heads": 4,
        "d_ff": 52,
        "vocab_size": 401,
    },
    "data": {"source": "file:none", "vocab_size": 257},
    "device": "cpu",
    "seq_len": 64,
    "batch_size": 2,
    "steps": 1,
}
WAYS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ddp": {"parallel": {"kind": "ddp", "replicate": 2}},
        "ddp_accumulated": {"parallel": {"kind": "ddp", "replicate": 2}, "grad_accum": 2},
        "zero1": {"parallel": {"kind": "zero1", "replicate": 2}},
        "zero2": {"parallel": {"kind": "zero2", "fsdp": 2}, "grad_accum": 2},
        "fsdp": {"parallel": {"fsdp": 2}, "grad_accum": 2},
        "tp": {"parallel": {"tp": 2}, "grad_accum": 2},
        "tp_full": {"parallel": {"tp": 2}, "grad_checkpoint": "full"},
        "pp": {"parallel": {"pp": 2}, "grad_accum": 4},
        "pp_interleaved": {
            "parallel": {"pp": 2, "pp_schedule": "interleaved"},
            "grad_accum": 4,
        },
        "cp": {"parallel": {"cp": 2}},
    },
    4: {
        "zero1_4": {"parallel": {"kind": "zero1", "replicate": 4}},
        "hsdp": {"parallel": {"fsdp": 2, "replicate": 2}},
        "tp_4": {"parallel": {"tp": 4}},
        "tp_fsdp": {"parallel": {"fsdp": 2, "tp": 2}},
        "tp_zero2": {"parallel": {"kind": "zero2", "fsdp": 2, "tp": 2}, "grad_accum": 2},
        "pp_4": {"parallel": {"pp": 4}, "grad_accum": 8, "grad_checkpoint": "full"},
        "pp_fsdp": {"parallel": {"pp": 2, "fsdp": 2}, "grad_accum": 4},
        "pp_fsdp_interleaved": {
            "parallel": {"pp": 2, "fsdp": 2, "pp_schedule": "interleaved"},
            "grad_accum": 4,
        },
        "cp_tp": {"parallel": {"cp": 2, "tp": 2}},
        "cp_tp_heads": {"parallel": {"cp": 2, "tp": 2, "cp_method": "ulysses"}, "grad_accum": 2},
        "cp_fsdp": {"parallel": {"fsdp": 2, "cp": 2}},
    },
}


def run_of(name: str) -> TrainConfig:
    changes = next(ways[name] for ways in WAYS.values() if name in ways)
    return checked(TrainConfig, deep_merge(BASE, changes), name)


def storages(tensors: list[Tensor]) -> int:
    """Bytes of the memory that these tensors of this process lie in."""
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    sizes = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in parts}
    return sum(sizes.values())


class Meter:
    """The peak of each phase of a step, in bytes of live tensors."""

    def __init__(self) -> None:
        self.tracker, self.peaks = LiveTensors(), dict[str, int]()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.tracker.reset_peak()
        with self.tracker:
            yield
        self.peaks[name] = max(self.peaks.get(name, 0), self.tracker.peak)


def measured(config: TrainConfig) -> dict[str, Any]:
    """Bytes of this process: of weights, gradients when they are complete and states, and the peaks
    of the phases of a step, in which all buffers are there already."""
    device = torch.device("cpu")
    model = prepare_model(config, device)
    optimizer = prepare_optimizer(model, config)
    make_states(optimizer)
    sequences = config.batch_size * config.grad_accum
    tokens = torch.randint(config.model.vocab_size, (sequences, config.seq_len + 1))
    found: dict[str, Any] = {}

    def update(optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found["gradients"] = storages(gradients)
        return clip_and_update(optimizer, limit)

    step = functools.partial(
        train_step, model, optimizer, tokens[:, :-1], tokens[:, 1:], config, device, update=update
    )
    step()  # buffers come to be
    meter = Meter()
    meter.tracker.add([model, optimizer, tokens])
    step(meter)  # and are seen
    peaks: list[dict[str, int]] = []
    for _ in range(4):  # now and then a thread of gloo holds a message for longer
        meter.peaks = {}
        step(meter)
        peaks.append(meter.peaks)
    weights = storages(list(model.parameters()))
    lowest = {phase: min(of[phase] for of in peaks) for phase in meter.peaks}
    states = sum(state.nbytes for state in kept_states(optimizer))
    return found | {"weights": weights, "states": states, "peaks": lowest}


def main(path: Path, names: list[str]) -> None:
    world: World = connect(torch.device("cpu"))
    facts = {name: world.gather(measured(run_of(name))) for name in names}
    world.close()
    if world.is_main:
        path.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","))
    leave()
