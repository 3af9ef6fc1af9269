"""`lsai predict`: peak memory and step time of a training run on any GPU, computed on any machine.

What imports torch is imported where it is needed: an answer from the disk cache does without.
"""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lsai_core.base.disk_cache import cached_on_disk
from lsai_core.base.errors import UserError
from lsai_core.model.hf_config import AnotherModel
from lsai_core.profiling.gpus import Gpu, find_gpu
from lsai_core.profiling.passport import Passport
from lsai_core.training.own_techniques import own_techniques
from lsai_lab.cli import options as opt
from lsai_lab.cli.hf_model import predict_hf_model
from lsai_lab.cli.script import largest_batch_of, predict_script
from lsai_lab.cli.tables import say, table
from lsai_lab.machine.environment import KERNELS, package_version
from lsai_lab.peers.settings import Peer
from lsai_lab.predictions.asked import Asked, Source, asked_for, describe, sizes_that_exist

LargestOption = Annotated[
    bool,
    typer.Option(
        help="Find the largest batch that fits the GPU; of --script: for {} in its arguments."
    ),
]
FileOption = Annotated[
    Path | None,
    typer.Option(
        "--config", help="A torchtitan configuration (TOML, to 0.2); others are recognized."
    ),
]
TrainerOption = Annotated[
    Peer | None,
    typer.Option(
        "--as", help="What that trainer would need, beside this package; of --config torchtitan."
    ),
]
# What is printed of each process; --json has more.
_OF_RANKS = (
    "rank",
    "peak GiB",
    "weights GiB",
    "gradients GiB",
    "optimizer GiB",
    "activations GiB",
    "needs GiB",
)
# How the columns of a prediction's table are written.
FORMATS = {
    "memory GiB": ".1f",
    "share": ".0%",
    "step s": ".3g",
    "tokens/s": ",.0f",
    "peak GiB": ".1f",
    "host GiB": ".1f",
    "needs GiB": ".2f",
    **dict.fromkeys(_OF_RANKS, ".2f"),
    "rank": "d",
}
_TIMED = ("step s", "tokens/s", "rates")
_COLUMNS = (
    "share: of the least that the allocator needs. tokens/s of all GPUs: a whole step's "
    "matmuls, attention, memory traffic and kernel starts at measured rates, or the host's "
    "work where that takes longer; communication is hidden behind them; over 8 GPUs, one "
    "400 Gb/s adapter each. Loading data and waiting are left out."
)
_LESS = ("rates", "share")  # what goes first where the screen is too narrow


def predict(
    study: opt.StudyOption = None,
    variant: opt.VariantOption = None,
    model: opt.ModelOption = None,
    hf: opt.HfOption = None,
    toml: FileOption = None,
    trainer: TrainerOption = None,
    gpu: opt.GpuOption = None,
    passport: opt.PassportOption = None,
    installed: opt.InstalledOption = None,
    gpus: opt.GpusOption = None,
    batch_size: opt.BatchOption = None,
    as_json: opt.JsonOption = False,
    profile: opt.ProfileOption = None,
    set_: opt.SetOption = None,
    script: Annotated[
        Path | None,
        typer.Option(help="Any training script, on a simulated GPU, to its third step; -- ARGS."),
    ] = None,
    largest_batch: LargestOption = False,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="The script's own arguments.")
    ] = None,
) -> None:
    source = Source(study, variant, model, hf, toml, profile)
    if script is not None:
        others = (trainer, passport, installed, gpus, batch_size, set_)
        if source != Source() or any(given is not None for given in others):
            raise UserError("--script goes with --gpu, --json and -- ARGS alone")
        _of_script(script, arguments or [], find_gpu(gpu or "h100"), as_json, largest_batch)
        return
    if arguments:
        raise UserError(f"{arguments[0]!r} belongs to a script; add --script, or leave it out")
    if passport:
        of_others = {"--passport": passport, "--as": trainer, "--config": toml}
        opt.exclude(of_others, "no time is predicted of other trainers")
    targets = asked_for(gpu, passport, largest_batch)
    if toml and trainer not in (None, "torchtitan"):
        raise UserError(
            f"--config {toml} is a file of torchtitan, not of {trainer}; leave --as out"
        )
    trainer = trainer or ("torchtitan" if toml else None)
    overrides = opt.overrides_from(set_, batch_size)
    try:
        asked = source.run(targets[0] if gpu or passport else None, gpus, overrides, trainer)
    except AnotherModel as error:
        if trainer not in (None, "hf") or gpus not in (None, 1) or installed or passport or not hf:
            raise _for_one_gpu(error) from None
        fits = predict_hf_model(hf, targets, overrides, as_json, error)
    else:
        if largest_batch:
            opt.exclude(
                {"--largest-batch": True, "--as": trainer, "--batch-size": batch_size},
                "the largest batch is this package's own, and is what is searched for",
            )
            asked = _with_largest_batch(asked, targets[0], installed)
        with sizes_that_exist(asked.config):
            fits = _show(asked, targets, as_json, trainer, installed)
    if not fits:
        raise typer.Exit(1)


def _of_script(
    script: Path, arguments: list[str], gpu: Gpu, as_json: bool, largest_batch: bool
) -> None:
    if largest_batch:
        largest_batch_of(script, arguments, gpu, as_json)
    elif not predict_script(script, arguments, gpu, as_json):
        raise typer.Exit(1)


def _for_one_gpu(error: AnotherModel) -> UserError:
    return UserError(
        f"{error}; a step of transformers' own code is predicted for one GPU, without --installed, "
        "--passport, and with no other --as than hf"
    )


def _with_largest_batch(asked: Asked, gpu: Gpu, installed: str | None) -> Asked:
    """The run with the largest batch that is predicted to fit `gpu`."""
    from lsai_lab.predictions.will_fit import expected_kernel, largest_batch

    kernel_of = partial(expected_kernel, gpu=gpu, packages=installed)
    with sizes_that_exist(asked.config):
        config = largest_batch(asked.config, gpu, kernel_of)
    found = f"the largest batch that fits {gpu.name} is {config.batch_size:,} sequences a GPU"
    return replace(asked, config=config, remarks=[found, *asked.remarks])


def _show(
    asked: Asked, gpus: list[Gpu], as_json: bool, trainer: Peer | None, installed: str | None
) -> bool:
    """Memory and time on `gpus`, of another trainer memory beside ours. False if it fits none of
    them."""
    config, trainer_memory = asked.config, asked.trainer_memory
    here = None if installed is not None else [package_version(name) for name in KERNELS]
    question = [
        config.model_dump_json(),
        [asdict(gpu) for gpu in gpus],
        trainer,
        trainer_memory,
        installed,
        here,
    ]

    def answer() -> dict[str, Any]:
        from lsai_lab.predictions.will_fit import will_fit

        return will_fit(config, gpus, trainer, trainer_memory, installed)

    if own := own_techniques(config):
        question.append(own)
    key = json.dumps(question, default=Passport.model_dump)
    found = cached_on_disk("lsai_lab.predictions.will_fit", key, answer)
    found |= {"remarks": [*asked.remarks, *found["remarks"]]}
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        every = trainer_memory.get("full_every")
        blocks = (
            f", which is full of every {every} blocks the last"
            if every and config.grad_checkpoint == "selective"
            else ""
        )
        _print(found, describe(config) + blocks, trainer)
    return any(row["verdict"] != "too large" for row in found["gpus"])


def _untimed(row: dict[str, Any]) -> str | None:
    """Why the time of a step is not predicted, where that is for the way of sharing the model."""
    said = str(row.get("rates"))
    return said if said.startswith("not predicted") else None


def _print(found: dict[str, Any], run: str, trainer: Peer | None) -> None:
    parts, ours, rows = found["parts_gib"], found["ours_gib"], found["gpus"]
    beside = f", by {trainer} (this package: {sum(ours.values()):.2f} GiB)" if trainer else ""
    needs, reserved = found["needs_gib"], found["reserved_gib"]
    say(found["answer"])
    say(f"{run}{beside}")
    for remark in found["remarks"]:
        say(f"Note: {remark}.")
    if len(rows) == 1 or "attention" not in rows[0]:
        print(f"Attention kernel assumed: {found['attention']}.")
    if reserved:  # of a CPU, live tensors are all that is predicted
        print(
            f"The allocator needs {needs:.2f} GiB of a GPU, and takes {reserved:.2f} where it can "
            f"have them."
        )
    whose = (
        f"of rank {found['rank']}" if found["ranks"] else "per GPU" if reserved else "of tensors"
    )
    print(f"\nPredicted peak {whose}: {found['peak_gib']:.2f} GiB, at that moment")
    for name, size in parts.items():
        print(f"  {name:18}{size:9.2f}" + (f"{ours[name]:9.2f}" if trainer else ""))
    phases = ", ".join(f"{name} {size:.2f}" for name, size in found["phases_gib"].items())
    say(f"Peaks of the phases: {phases}")
    if found["host_gib"]:
        print(f"In host memory, per GPU: {found['host_gib']:.2f} GiB")
    untimed = next((why for row in rows if (why := _untimed(row))), None)
    if untimed:
        rows = [{name: row[name] for name in row if name not in _TIMED} for row in rows]
    print(f"\n{table(rows, _LESS, formats=FORMATS)}")
    if found["ranks"]:
        print("\nBy process (the figures above are those of the one that needs the most):")
        told = [{name: row[name] for name in _OF_RANKS} for row in found["ranks"]]
        print(table(told, formats=FORMATS))
    say(
        f"share: of the least that the allocator needs. Time of a step: {untimed}."
        if untimed
        else _COLUMNS
    )
    if found["otherwise"]:
        print("\nWith other packages of attention kernels (--installed):")
        print(table(found["otherwise"], _LESS, formats=FORMATS))
    if all(row["verdict"] == "too large" for row in rows):
        print("Too large: `lsai techniques` with --gpu shows what would fit, and how.")
