"""The `train` kind: train one configuration and reduce what happened to results, as DESIGN.md
defines them."""

import math
from pathlib import Path
from typing import Any

import torch

from lsai_core.base.limits import cpu_cores
from lsai_core.config.train import Precision, TrainConfig
from lsai_core.fp8 import recipes
from lsai_core.model.transformer import count_parameters
from lsai_core.profiling import flops
from lsai_core.training import checkpoint, step
from lsai_core.training.batches import BatchStream
from lsai_core.training.loop import Trained, train
from lsai_lab.benches.machine import peak_of_this_machine, rated, speed_summary
from lsai_lab.data import Dataset, prepare
from lsai_lab.data.checkpoints import require_same_tokenizer, write_tokenizer
from lsai_lab.launch.launch import launch, require_devices
from lsai_lab.launch.srun import srun_command
from lsai_lab.runs.kinds import Context


def require(config: TrainConfig) -> None:
    """Raise Unavailable if this machine lacks what the run needs; processes that srun starts
    elsewhere say so themselves."""
    if config.parallel.distributed:
        if srun_command(config.parallel.world_size) is None:
            require_devices(config.device, config.parallel.world_size)
        return
    step.require(config, step.resolve_device(config.device))


def run(config: TrainConfig, context: Context) -> dict[str, Any]:
    """Train and measure; returns the flat results of `summary.json`.

    A run of several processes, or of a sharded model in one, calls this in the notebook's kernel,
    which launches them, and then in each of them.
    """
    require(config)  # "unavailable" is said before any work is done
    if config.parallel.distributed and not context.world.launched:
        nproc = config.parallel.world_size
        command = srun_command(nproc)
        prepare(config.data, context.data_root)  # once, before all need it at the same time
        return launch(
            context.folder, context.data_root, nproc, on_rows=context.on_rows, command=command
        )
    device, world = step.resolve_device(config.device), context.world
    dataset = prepare(config.data, context.data_root)
    # The text must hold a batch, which costs nothing to know before there is a model.
    BatchStream(
        dataset.tokens("train"), config.batch_size * config.grad_accum, config.seq_len, config.seed
    )
    if config.init_from is not None:
        from lsai_core.model.hf import find_checkpoint

        require_same_tokenizer(dataset, find_checkpoint(config.init_from))
    per_token = flops.flops_per_token(config.model, config.seq_len, config.attention.window)
    peak = _peak(config.precision, context, device)
    per_rate = rated(1.0, per_token, peak, world.size, device.type == "cuda")
    trained = train(config, dataset, context.folder, context.on_rows, per_rate["mfu"], world)
    if config.checkpoint.export:
        _export(config, trained, dataset, context)
    if world.is_main:
        checkpoint.remove_all(context.folder)

    parameters = count_parameters(config.model)
    speed = speed_summary(trained.timed_ms, config.tokens_per_step)
    last = [row["loss"] for row in trained.rows[-10:]]
    return {
        **speed,
        **rated(speed.get("tokens_per_s"), per_token, peak, world.size, device.type == "cuda"),
        "parameters": parameters.total,
        "parameters_non_embedding": parameters.non_embedding,
        "steps": config.steps,
        "tokens": config.steps * config.tokens_per_step,
        "train_loss": sum(last) / len(last),
        "validation_loss": trained.validation_loss,
        "validation_perplexity": math.exp(min(trained.validation_loss, 50.0)),
        "train_s": trained.train_s,
        "setup_s": trained.setup_s,
        "first_step_s": trained.first_step_s,
        "resumed_at": trained.resumed_at,
        "attention_kernel": trained.attention_kernel,
        **trained.optimizer,
        "weights": Path(config.init_from).name if config.init_from else "random",
        **recipes.facts(config),
        "dataset": dataset.folder.name,
        "text_tokens": len(dataset.tokens("train")),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        **trained.measured,
        **_idle(speed, trained.measured),
    }


def _idle(speed: dict[str, Any], measured: dict[str, Any]) -> dict[str, float]:
    """How long no kernel ran in a traced step; empty without a trace.

    Not the gaps in the trace itself, since the profiler makes the host slower.
    """
    step_ms, busy_ms = speed.get("step_ms"), measured.get("gpu_busy_ms")
    if step_ms is None or busy_ms is None:
        return {}
    return {
        "kernel_idle_ms": max(0.0, step_ms - busy_ms),
        "gpu_busy_share": min(1.0, busy_ms / step_ms),
    }


def _export(config: TrainConfig, trained: Trained, dataset: Dataset, context: Context) -> None:
    """Write the trained model and its tokenizer as a Hugging Face checkpoint, `model`."""
    # these load what most runs never need
    from lsai_core.model.hf import find_checkpoint, max_positions
    from lsai_core.training.sharded_checkpoint import export_hf

    known = max_positions(find_checkpoint(config.init_from)) if config.init_from else 0
    folder, world = context.folder / "model", context.world
    if world.is_main:
        write_tokenizer(dataset, folder)
    export_hf(trained.model, folder, world, max_seq_len=max(config.seq_len, known))


def _peak(precision: Precision, context: Context, device: torch.device) -> flops.Peak | None:
    """The MFU denominator, on rank 0. Of CPU processes, which share a processor, it may measure
    with all cores."""
    peak = None
    context.world.barrier()
    if context.world.is_main:
        threads = torch.get_num_threads()
        if context.world.size > 1:
            torch.set_num_threads(cpu_cores())
        peak = peak_of_this_machine(device, precision, context.runs_root)
        torch.set_num_threads(threads)
    context.world.barrier()
    return peak
