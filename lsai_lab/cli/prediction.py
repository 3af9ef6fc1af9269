"""`lsai predict`: peak memory and step time of a training run on any GPU, computed on any machine.

What imports torch is imported where it is needed: an answer from the disk cache does without.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from lsai_core.base.disk_cache import cached_on_disk
from lsai_core.base.errors import UserError
from lsai_core.base.files import deep_merge
from lsai_core.config.presets import PRESETS
from lsai_core.config.train import TrainConfig
from lsai_core.model import hf_config
from lsai_core.profiling.gpus import GPUS, Gpu, find_gpu
from lsai_core.training.combinations import checked
from lsai_lab.cli import options as opt
from lsai_lab.machine.environment import KERNELS, gpu_facts, package_version
from lsai_lab.peers.settings import PLAIN, Peer
from lsai_lab.peers.trainer_file import read_trainer_file
from lsai_lab.project.files import repo_root

# Of the text nothing matters; the smallest vocabulary fits any model.
_DEFAULTS: dict[str, Any] = {
    "precision": "bf16",
    "compile": True,
    "seq_len": 4096,
    "batch_size": 1,
    "data": {"vocab_size": 257},
}


def predict(
    study: Annotated[str | None, typer.Option(help="Study in params/studies.")] = None,
    variant: Annotated[str | None, typer.Option(help="Variant of the study.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A preset (course, llama3-8b, ...), in bf16 and compiled.")
    ] = None,
    hf: Annotated[
        Path | None, typer.Option(help="The same of a Hugging Face config.json, or its folder.")
    ] = None,
    toml: Annotated[
        Path | None,
        typer.Option(
            "--config", help="A torchtitan configuration (TOML, to 0.2); others are recognized."
        ),
    ] = None,
    trainer: Annotated[
        Peer | None,
        typer.Option(
            "--as",
            help="What that trainer would need, beside this package; of --config torchtitan.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="One GPU, e.g. rtx4090, b200, 'a100 80gb', a MIG slice, or its memory, e.g. 24GB; "
            "default: common ones."
        ),
    ] = None,
    installed: Annotated[
        str | None,
        typer.Option(
            help="Packages with attention kernels there: fa2,fa3,fa4, or none; default: those of "
            "this environment."
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Shard over so many GPUs (parallel.fsdp).")
    ] = None,
    techniques: Annotated[
        bool,
        typer.Option(
            "--techniques",
            help="Compare the techniques that save memory: which fits first? (minutes)",
        ),
    ] = False,
    find_longest: Annotated[
        bool,
        typer.Option(
            "--longest", help="Find the longest sequence that fits the GPU (seq_len is ignored)."
        ),
    ] = False,
    batch_size: opt.BatchOption = None,
    as_json: opt.JsonOption = False,
    profile: opt.ProfileOption = None,
    set_: opt.SetOption = None,
) -> None:
    overrides = opt.merged(
        opt.overrides_from(set_, batch_size),
        {"parallel": {"fsdp": gpus}} if gpus and not toml else {},
    )
    target = None if gpu is None else find_gpu(gpu)
    if toml and trainer not in (None, "torchtitan"):
        raise UserError(
            f"--config {toml} is a file of torchtitan, not of {trainer}; leave --as out"
        )
    trainer = trainer or ("torchtitan" if toml else None)
    if find_longest + techniques + bool(trainer) > 1:
        raise UserError(
            "--longest, --techniques and --as (or --config) are two questions; ask one of them"
        )
    if sum(given is not None for given in (study, model, hf, toml)) != 1:
        raise UserError("say what to predict: --study with --variant, or --model, --hf or --config")
    if techniques and as_json:
        raise UserError("--techniques is a table, and has no --json; leave one of them out")
    if profile is not None and study is None:
        raise UserError("--profile changes a study; add --study, or leave it out")
    if study is not None:
        asked = Asked(
            _of_study(
                study, variant, deep_merge(PLAIN if trainer else {}, overrides), target, profile
            )
        )
    elif variant is not None:
        raise UserError("--variant belongs to a study; add --study, or leave it out")
    elif toml:  # needs no checkout, as the next two
        asked = _of_file(toml, gpus, overrides)
    elif hf:
        asked = _of_hf(hf, bool(trainer), overrides)
    else:
        data = _DEFAULTS | {"model": {"preset": model}} | (PLAIN if trainer else {})
        asked = Asked(checked(TrainConfig, deep_merge(data, overrides), f"--model {model}"))
    if techniques and installed is not None:
        raise UserError(
            "--techniques takes fused attention kernels for given; leave --installed out"
        )
    try:
        if find_longest:
            _show_longest(asked.config, target or _this_gpu(), as_json, installed)
        elif techniques:
            _show_techniques(asked.config, target or _this_gpu())
        elif not _show(asked, [target] if target else list(GPUS), as_json, trainer, installed):
            raise typer.Exit(1)
    except (RuntimeError, OverflowError) as error:
        if "overflow" not in str(error) and not isinstance(error, OverflowError):
            raise
        what = describe(asked.config)
        raise UserError(f"{what}: larger than any tensor can be ({error})") from None


@dataclass(frozen=True)
class Asked:
    """What is to be predicted: the run, the fields of `TrainerMemory` that a trainer's file sets,
    and remarks."""

    config: TrainConfig
    trainer_memory: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def _of_file(path: Path, gpus: int | None, overrides: dict[str, Any]) -> Asked:
    """The run of another trainer's configuration file."""
    run = read_trainer_file(path, gpus)
    return Asked(
        checked(TrainConfig, deep_merge(run.config, overrides), f"--config {path}"),
        run.trainer_memory,
        run.remarks,
    )


def _of_hf(path: Path, by_trainer: bool, overrides: dict[str, Any]) -> Asked:
    """The run of a Hugging Face config.json, with its window where that is shorter than the
    sequence."""
    found = hf_config.describe(path)
    shape = {"model": found.model.model_dump(exclude={"preset"})}
    data = deep_merge(_DEFAULTS | shape | (PLAIN if by_trainer else {}), overrides)
    remarks = [*found.differs, *found.notes]
    length = data["seq_len"]
    if found.window is not None and isinstance(length, int) and found.window < length:
        data = deep_merge({"attention": {"window": found.window}}, data)
        remarks.append(f"attention looks back {found.window} positions (sliding_window)")
    return Asked(checked(TrainConfig, data, f"--hf {path}"), remarks=remarks)


def _of_study(
    study: str, variant: str | None, overrides: Any, target: Gpu | None, profile: str | None
) -> TrainConfig:
    """A variant of a study as the GPU would run it, not as this machine would, unless a profile is
    named."""
    from lsai_lab.runs.session import Session
    from lsai_lab.runs.study import detect_profile, resolve, select_variants
    from lsai_lab.searches.model_search import ModelSearchConfig

    name = target.driver_name if target else gpu_facts()["gpu"] or "any GPU"
    loaded = Session(profile or detect_profile(repo_root(), name)).study(study)
    chosen = select_variants(loaded, [variant or next(iter(loaded.variants))], [])[0]
    for part, spec in loaded.parts.items():
        if spec.kind not in ("train", "model_search") or chosen not in loaded.measured(part):
            continue
        config = resolve(loaded, chosen, part, 0, overrides)
        if isinstance(config, ModelSearchConfig) and config.measure == "train":
            return config.train  # with the study's model, from which the search lets it grow
        if isinstance(config, TrainConfig):
            return config
    raise UserError(f"study {study} trains no variant {chosen} with this package's trainer")


def _this_gpu() -> Gpu:
    name = gpu_facts()["gpu"]
    if name is None:
        raise UserError(
            f"this machine has no GPU; say which one with --gpu: "
            f"{', '.join(gpu.name for gpu in GPUS)}"
        )
    return find_gpu(str(name))


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

    found = cached_on_disk("lsai_lab.predictions.will_fit", json.dumps(question), answer) | {
        "remarks": asked.remarks
    }
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


def _print(found: dict[str, Any], run: str, trainer: Peer | None) -> None:
    parts, ours, rows = found["parts_gib"], found["ours_gib"], found["gpus"]
    beside = f", by {trainer} (this package: {sum(ours.values()):.2f} GiB)" if trainer else ""
    needs, reserved = found["needs_gib"], found["reserved_gib"]
    print(f"{found['answer']}\n{run}{beside}")
    for remark in found["remarks"]:
        print(f"Note: {remark}.")
    if len(rows) == 1 or "attention" not in rows[0]:
        print(f"Attention kernel assumed: {found['attention']}.")
    print(
        f"The allocator needs {needs:.2f} GiB of a GPU, and takes {reserved:.2f} where it can have "
        f"them."
    )
    print(f"\nPredicted peak per GPU: {found['peak_gib']:.2f} GiB, at that moment")
    for name, size in parts.items():
        print(f"  {name:18}{size:9.2f}" + (f"{ours[name]:9.2f}" if trainer else ""))
    print(
        "Peaks of the phases: "
        + ", ".join(f"{name} {size:.2f}" for name, size in found["phases_gib"].items())
    )
    if found["host_gib"]:
        print(f"In host memory, per GPU: {found['host_gib']:.2f} GiB")
    print(
        f"\n{_table(rows)}\nshare: of the least that the allocator needs. tokens/s of one GPU: a "
        f"whole step's products, attention, "
        "memory traffic and kernel starts at measured rates, or the host's work where that takes "
        "longer; communication is hidden "
        "behind them; over 8 GPUs, one 400 Gb/s adapter each. Loading data and waiting are left "
        "out."
    )
    if found["otherwise"]:
        print(
            f"\nWith other packages of attention kernels "
            f"(--installed):\n{_table(found['otherwise'])}"
        )
    if all(row["verdict"] == "too large" for row in rows):
        print("Too large: --techniques with --gpu shows what would fit, and how.")


def _show_techniques(task: TrainConfig, gpu: Gpu) -> None:
    from lsai_core.prediction import verdict
    from lsai_lab.predictions import techniques as known_techniques
    from lsai_lab.predictions.will_fit import timed

    with tqdm(
        total=len(known_techniques.TECHNIQUES) + 1, unit="technique", leave=False, disable=None
    ) as bar:

        def on_next(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        rows = known_techniques.compare(task, gpu, on_next)
    table = [
        {
            "technique": row.name,
            "GPUs": row.config.parallel.world_size,
            "peak GiB": row.prediction.peak,
            "host GiB": row.prediction.host or None,
            "verdict": verdict(row.prediction, gpu),
            **timed(row.config, gpu),
        }
        for row in rows
    ]
    print(f"{describe(task)}\n\nOn {gpu.name} ({gpu.memory_gib:g} GiB):\n{_table(table)}")
    first = known_techniques.first_that_fits(rows, gpu)
    if first is None:
        print(
            "Nothing fits: take a shorter sequence, a smaller batch, a smaller model, or a larger "
            "GPU."
        )
    else:
        print(f"The first that fits: {first.name}, {first.prediction.peak:.1f} GiB.")
        if settings := known_techniques.settings_of(task, first):
            print("Its settings: " + " ".join(f"--set {pair}" for pair in settings))


def _show_longest(config: TrainConfig, gpu: Gpu, as_json: bool, installed: str | None) -> None:
    from lsai_lab.predictions.will_fit import expected_kernel, longest, timed

    def kernel_of(asked: TrainConfig) -> str | None:
        return expected_kernel(asked, gpu, installed)

    run, found, limited = longest(config, gpu, kernel_of)
    kernel, gpus, peak, host = kernel_of(run), run.parallel.world_size, found.peak, found.host
    time = timed(run, gpu, kernel)
    if as_json:
        print(
            json.dumps(
                {
                    "tokens": run.seq_len,
                    "limited_by_memory": limited,
                    "gpus": gpus,
                    "peak_gib": peak,
                    "host_gib": host,
                    "gpu": gpu.name,
                    "attention": kernel,
                    **time,
                },
                indent=1,
            )
        )
        return
    print(
        f"{describe(run)}\n\nThe longest sequence on {gpus} x {gpu.name} ({gpu.memory_gib:g} GiB): "
        f"{run.seq_len:,} tokens"
    )
    print(f"  predicted peak per GPU {peak:9.1f} GiB ({peak / gpu.memory_gib:.0%})")
    if kernel is not None:
        print(f"  attention kernel       {kernel:>9}, assumed")
    print(f"  host memory per GPU    {host:9.1f} GiB, in all {host * gpus:.1f} GiB")
    if time["step s"] is not None:
        print(f"  a step, estimated      {time['step s']:9.0f} s ({time['rates']})")
    if not limited:
        print(
            "Memory would take longer ones; positions beyond are not exact in the rotary "
            "embedding's fp32."
        )


def _table(rows: list[dict[str, Any]]) -> str:
    formats = {
        "share": ".0%",
        "step s": ".3g",
        "tokens/s": ",.0f",
        "peak GiB": ".1f",
        "host GiB": ".1f",
        "needs GiB": ".2f",
    }
    columns = []
    for name in rows[0]:
        if any(row[name] is not None for row in rows):
            texts = [
                name,
                *(
                    "" if row[name] is None else format(row[name], formats.get(name, ""))
                    for row in rows
                ),
            ]
            columns.append([text.rjust(max(map(len, texts))) for text in texts])
    return "\n".join("  ".join(line) for line in zip(*columns, strict=True))


def describe(config: TrainConfig) -> str:
    """One line: what is predicted."""
    model, cp, gpus = config.model, config.parallel.cp, config.parallel.world_size
    # The preset's name, if the shape is still the preset's.
    same = all(
        getattr(model, name, None) == value
        for name, value in PRESETS.get(model.preset, {"": ""}).items()
    )
    fp8 = "" if config.fp8.recipe == "none" else f" with fp8 ({config.fp8.recipe})"
    words = [
        f"{model.preset if same else 'custom'} ({model.n_layers} layers, width {model.d_model})",
        f"{config.batch_size} x {config.seq_len} tokens "
        + ("a GPU" if cp == 1 else f"over {cp} GPUs"),
        f"{config.precision}{fp8}, loss {config.loss}, blocks {config.blocks}",
        "compiled" if config.compile else "eager",
        f"checkpointing {config.grad_checkpoint}"
        + " with inputs on the host" * (config.saved_inputs == "host"),
        f"{gpus} GPU{'s' if gpus > 1 else ''}",
    ]
    return ", ".join(words)
