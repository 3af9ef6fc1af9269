"""Watching another trainer from inside its process: it is told when a step ends, and everything
else it reads itself.

At a step's end an event goes into the stream and the loss tensor is kept; the host waits only after
the first step, which is not timed, so the trainer runs as it would unwatched. `finish` puts the
pieces together and rank 0 writes `results.json` and `metrics.jsonl`, which until then says how many
steps are queued.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lsai_core.base.files import write_json, write_text
from lsai_core.config.strict import validated
from lsai_core.model.transformer import count_parameters
from lsai_core.profiling.steptime import StepTimer
from lsai_core.training.metrics import finite
from lsai_lab.benches.machine import speed_summary
from lsai_lab.data import BatchStream, Dataset
from lsai_lab.launch.launch import RESULTS
from lsai_lab.peers.config import PeerConfig

FOLDER = "LSAI_PEER"
GIB = 2**30


class Job:
    """What a peer's process is to do: `job.json` in the folder that $LSAI_PEER names."""

    def __init__(self) -> None:
        self.folder = Path(os.environ[FOLDER])
        job = json.loads((self.folder / "job.json").read_text(encoding="utf-8"))
        self.config: PeerConfig = validated(
            PeerConfig, job["config"], str(self.folder / "job.json")
        )
        self.dataset, self.adapter = Path(job["dataset"]), job["adapter"]
        self.run_folder = self.folder.parent
        self.rank = int(os.environ.get("RANK", 0))
        self.begun = time.perf_counter()

    def windows(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and targets, int64 (S,), of all sequences of the training split that all processes
        train on."""
        config = self.config
        stream = BatchStream(Dataset(self.dataset).tokens("train"), 1, config.seq_len, config.seed)
        number = config.steps * config.batch_size * config.parallel.readers
        return [(x[0], y[0]) for x, y in map(stream.batch, range(number))]


class Watch:
    """Step times, losses and memory of this process. `begin`, `step` after every step, then
    `finish`."""

    def __init__(self, job: Job, device: torch.device, *, loss_is_share: bool = False) -> None:
        """`loss_is_share`: the losses of the processes that read different sequences add up to the
        mean loss; else each is a mean of its own."""
        self.job, self.device, self.loss_is_share = job, device, loss_is_share
        self.timer, self.on_gpu = StepTimer(device), device.type == "cuda"
        self.losses: list[torch.Tensor] = []
        self.memory: list[tuple[float, float]] = []
        self.begun, self.first_step_s = 0.0, 0.0

    def check_size(self, model: torch.nn.Module) -> None:
        """Raise RuntimeError unless the model that is about to be trained is as large as ours."""
        theirs, ours = (
            sum(p.numel() for p in model.parameters()),
            count_parameters(self.job.config.model).total,
        )
        if theirs != ours:
            raise RuntimeError(
                f"the peer's model has {theirs:,} parameters, this package's {ours:,}"
            )

    def check(self, model: torch.nn.Module) -> None:
        """As `check_size`, and the model must have torchao's fp8 layers if asked for."""
        self.check_size(model)
        kinds = {type(module).__name__ for module in model.modules()}
        if self.job.config.fp8 != "none" and "Float8Linear" not in kinds:
            raise RuntimeError("fp8 was asked for, but the peer's model has no Float8Linear")

    def begin(self) -> None:
        """The first step is about to begin."""
        self.begun = time.perf_counter()
        self.timer.mark()

    def loss(self, loss: torch.Tensor) -> None:
        """The loss of the running step, a scalar: a copy of it stays where it is (a CUDA graph
        writes the next one over it). Where processes share the logits, each has the whole loss."""
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        self.losses.append(loss.detach().float().clone())

    def step(self) -> None:
        """A step has been queued."""
        self.timer.mark()
        done, first, peaks = len(self.memory) + 1, not self.memory, (0.0, 0.0)
        if self.on_gpu:
            if first:
                torch.cuda.synchronize(self.device)
            # Read at every step, since a trainer may reset the peaks for figures of its own.
            peaks = (
                torch.cuda.max_memory_allocated(self.device) / GIB,
                torch.cuda.max_memory_reserved(self.device) / GIB,
            )
        self.memory.append(peaks)
        if first:
            self.first_step_s = time.perf_counter() - self.begun
            if self.on_gpu:  # what compiling needed is not what training needs
                torch.cuda.reset_peak_memory_stats(self.device)
        if self.job.rank == 0 and (first or done % 10 == 0):
            with (self.job.run_folder / "metrics.jsonl").open(
                "w" if first else "a", encoding="utf-8"
            ) as file:
                file.write(json.dumps(self._row(done - 1, step_ms=None)) + "\n")

    def finish(self, **facts: Any) -> None:
        """Write what was seen; `facts` join the results. To be called by all processes."""
        durations_ms, config, on_gpu = self.timer.durations_ms(), self.job.config, self.on_gpu
        losses = torch.stack(self.losses)
        steady = self.memory[config.skip_steps :] or self.memory
        peaks = torch.tensor(steady, device=self.device).amax(0)
        if config.parallel.world_size > 1:
            dist.all_reduce(losses)
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        if self.job.rank != 0:
            return
        parallel = config.parallel
        summands = parallel.members if self.loss_is_share else parallel.world_size
        loss = (losses / summands).tolist()
        allocated, reserved = peaks.tolist()
        lines = []
        for step, (ms, one, memory) in enumerate(zip(durations_ms, loss, self.memory, strict=True)):
            row = self._row(
                step, loss=one, step_ms=ms, tokens_per_s=config.tokens_per_step * 1e3 / ms
            )
            if on_gpu:
                row |= dict(
                    zip(("memory_allocated_gib", "memory_reserved_gib"), memory, strict=True)
                )
            lines.append(json.dumps(finite(row)) + "\n")
        write_text(self.job.run_folder / "metrics.jsonl", "".join(lines))
        last = loss[-10:]  # as in the train kind
        results = {
            **speed_summary(durations_ms, config.tokens_per_step, config.skip_steps),
            "parameters": count_parameters(config.model).total,
            "steps": len(durations_ms),
            "tokens": len(durations_ms) * config.tokens_per_step,
            "train_loss": sum(last) / len(last),
            "train_s": sum(durations_ms) / 1e3,
            "setup_s": self.begun - self.job.begun,
            "first_step_s": self.first_step_s,
            "mem_peak_allocated_gib": allocated if on_gpu else None,
            "mem_peak_reserved_gib": reserved if on_gpu else None,
            "memory_kind": "CUDA caching allocator" if on_gpu else "not measured on a CPU",
            "device": torch.cuda.get_device_name(self.device) if on_gpu else "cpu",
            "host_threads": torch.get_num_threads(),
            **facts,
        }
        write_json(self.job.run_folder / RESULTS, finite(results))

    def _row(self, step: int, **measured: float | None) -> dict[str, Any]:
        config = self.job.config
        steady = step >= config.skip_steps
        return {
            "step": step,
            "tokens_in_step": config.tokens_per_step,
            "steady": steady,
            **measured,
        }
