"""Which run a question about memory and time is asked of: a study's variant, a preset, a Hugging
Face configuration or another trainer's file as a `TrainConfig`."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsai_core.base.errors import UserError
from lsai_core.config.model import PRESETS, ModelConfig
from lsai_core.config.parallel import ParallelConfig
from lsai_core.config.strict import deep_merge
from lsai_core.config.train import TrainConfig
from lsai_core.model import hf_config
from lsai_core.profiling.gpus import GPUS, Gpu, find_gpu, passport_gpu
from lsai_core.training.combinations import checked
from lsai_lab.machine.environment import gpu_facts
from lsai_lab.peers.settings import PLAIN, Peer
from lsai_lab.peers.trainer_file import read_trainer_file
from lsai_lab.project.files import repo_root

# Of the text nothing matters; the smallest vocabulary fits any model.
UNREAD_VOCABULARY = 257
DEFAULTS: dict[str, Any] = {
    "precision": "bf16",
    "compile": True,
    "seq_len": 4096,
    "batch_size": 1,
    "data": {"vocab_size": UNREAD_VOCABULARY},
}
# Whose product is the number of GPUs.
_DEGREES = ("tp", "pp", "cp", "fsdp", "replicate")


@dataclass(frozen=True)
class Asked:
    """What is to be predicted: the run, the fields of `TrainerMemory` that a trainer's file sets,
    and remarks."""

    config: TrainConfig
    trainer_memory: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """Where the run stands, of which one is given: a study, a preset, a Hugging Face configuration
    or another trainer's file."""

    study: str | None = None
    variant: str | None = None
    model: str | None = None
    hf: Path | None = None
    toml: Path | None = None
    profile: str | None = None

    def run(
        self,
        gpu: Gpu | None,
        gpus: int | None,
        overrides: dict[str, Any],
        trainer: Peer | None = None,
    ) -> Asked:
        """The run on GPUs such as `gpu`, with `overrides`; in the plain setting that `trainer`
        knows, if there is one. UserError for options that do not fit."""
        if sum(given is not None for given in (self.study, self.model, self.hf, self.toml)) != 1:
            raise UserError(
                "say what to predict, in one way: --study with --variant, or --model, or --hf "
                "(or `lsai predict --config`)"
            )
        for name, value in {"variant": self.variant, "profile": self.profile}.items():
            if value is not None and self.study is None:
                raise UserError(f"--{name} belongs to a study; add --study, or leave it out")
        if self.toml is not None:  # needs no checkout, as --hf and --model
            return _of_file(self.toml, gpus, overrides)
        if self.study is not None:
            plain, profile = PLAIN if trainer else {}, self.profile or _profile_for(gpu)
            if gpus is not None:
                own = _of_study(self.study, self.variant, plain, profile).parallel
                overrides = shared_by(gpus, overrides, own)
            settings = deep_merge(plain, overrides)
            config = _of_study(self.study, self.variant, settings, profile)
            return Asked(config, remarks=[f"settings of the study under profile {profile}"])
        overrides = shared_by(gpus, overrides)
        if self.hf is not None:
            return _of_hf(self.hf, bool(trainer), overrides)
        data = DEFAULTS | {"model": {"preset": self.model}} | (PLAIN if trainer else {})
        return Asked(checked(TrainConfig, deep_merge(data, overrides), f"preset {self.model}"))


def shared_by(
    gpus: int | None, changes: dict[str, Any], own: ParallelConfig | None = None
) -> dict[str, Any]:
    """`changes` (nested) with which a run whose own way is `own` has so many GPUs in all: what
    `tp`, `pp`, `cp` and `replicate` leave, FSDP shares; of `ddp` and `zero1` they are copies.
    UserError for a number below 1, and where these have no such product."""
    if gpus is None:
        return changes
    if type(gpus) is not int or gpus < 1:
        raise UserError(f"--gpus is a whole number of at least 1, not {gpus!r}")
    given = changes.get("parallel") or {}
    if not isinstance(given, dict):
        return changes  # refused with the other settings
    way = (own or ParallelConfig()).model_dump() | given
    rest = "replicate" if way["kind"] in ("ddp", "zero1") else "fsdp"
    held = {name: way[name] for name in _DEGREES if name != rest or name in given}
    if rest == "replicate" and "fsdp" not in given:
        held["fsdp"] = 1
    if not all(type(degree) is int and degree > 0 for degree in held.values()):
        return changes
    product = math.prod(held.values())
    if gpus % product or (rest in held and product != gpus):
        words = " x ".join(f"parallel.{name} {size}" for name, size in held.items() if size > 1)
        makes = "" if rest in held else "a multiple of "
        raise UserError(f"--gpus {gpus}: {words} makes {makes}{product} GPUs")
    shares = {rest: held.get(rest, gpus // product), "fsdp": held.get("fsdp", gpus // product)}
    return deep_merge(changes, {"parallel": shares})


def _of_file(path: Path, gpus: int | None, overrides: dict[str, Any]) -> Asked:
    """The run of another trainer's configuration file."""
    run = read_trainer_file(path, gpus)
    return Asked(
        checked(TrainConfig, deep_merge(run.config, overrides), f"{path}"),
        run.trainer_memory,
        run.remarks,
    )


def _of_hf(path: Path, by_trainer: bool, overrides: dict[str, Any]) -> Asked:
    """The run of a Hugging Face config.json, with its window where that is shorter than the
    sequence."""
    found = hf_config.describe(path)
    shape = {"model": found.model.model_dump(exclude={"preset"})}
    data = deep_merge(DEFAULTS | shape | (PLAIN if by_trainer else {}), overrides)
    remarks = [*found.differs, *found.notes]
    length = data["seq_len"]
    if found.window is not None and isinstance(length, int) and found.window < length:
        data = deep_merge({"attention": {"window": found.window}}, data)
        remarks.append(f"attention looks back {found.window} positions (sliding_window)")
    return Asked(checked(TrainConfig, data, f"{path}"), remarks=remarks)


def _profile_for(target: Gpu | None) -> str:
    """The profile of a study on that GPU; None: on this machine."""
    from lsai_lab.runs.study import detect_profile

    name = target.driver_name if target else gpu_facts()["gpu"] or "any GPU"
    return detect_profile(repo_root(), None if target and target.is_cpu else name)


def _of_study(study: str, variant: str | None, overrides: Any, profile: str) -> TrainConfig:
    """A variant of a study as a machine of that profile would run it."""
    from lsai_lab.runs.session import Session
    from lsai_lab.runs.study import resolve, select_variants
    from lsai_lab.searches.config import ModelSearchConfig

    loaded = Session(profile).study(study)
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


def gpu_called(name: str | None, passport: Path | None = None) -> Gpu:
    """The GPU of that name; None: that of the file `passport`, or else this machine's. UserError if
    there is none, or if the passport is another device's."""
    if passport is not None:
        return _of_passport(passport, name)
    if name is not None:
        return find_gpu(name)
    found = gpu_facts()["gpu"]
    if found is None:
        raise UserError(
            f"this machine has no GPU; say which one with --gpu: "
            f"{', '.join(gpu.name for gpu in GPUS)}"
        )
    return find_gpu(str(found))


def asked_for(gpu: str | None, passport: Path | None, largest: bool) -> list[Gpu]:
    """The devices that a prediction is asked for: the one named or of `passport`, else all that are
    shown; of a `largest` size, which is found for one GPU, this machine's. UserError for others."""
    if gpu is None and passport is None and not largest:
        return list(GPUS)
    target = gpu_called(gpu, passport)
    if largest and target.is_cpu:
        raise UserError(f"{passport} is the passport of a CPU; the largest is found for GPUs")
    return [target]


def _of_passport(path: Path, name: str | None) -> Gpu:
    """The device of a passport, which is the one called `name`, if one is named."""
    measured = passport_gpu(path)
    device = measured.driver_name
    known = [device.lower(), *(["cpu"] if measured.is_cpu else [])]
    if name is None or name.lower() in known or find_gpu(name).is_called(device):
        return measured
    raise UserError(f"{path} is the passport of {device}, not of {name}; leave one of them out")


@contextlib.contextmanager
def sizes_that_exist(config: TrainConfig) -> Iterator[None]:
    """UserError instead of an overflow where a tensor of `config` would be larger than any."""
    try:
        yield
    except (RuntimeError, OverflowError) as error:
        if "overflow" not in str(error) and not isinstance(error, OverflowError):
            raise
        raise UserError(f"{describe(config)}: larger than any tensor can be ({error})") from None


def _ways(parallel: ParallelConfig) -> str:
    """How several GPUs share the model: ` (tp 2, fsdp 2)`."""
    sizes = {name: getattr(parallel, name) for name in ("pp", "tp", "cp", "fsdp", "replicate")}
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if parallel.kind != "fsdp":
        words = [parallel.kind, *words]
    if parallel.pp > 1:
        words.append(parallel.pp_schedule)
    return f" ({', '.join(words)})" if words else ""


def _blocks(config: TrainConfig) -> str:
    """In which blocks, where not in all."""
    if config.checkpoint_blocks is None:
        return ""
    layers, others = config.model.n_layers, config.checkpoint_others
    return f" in {config.checkpoint_blocks} of {layers} blocks, {others} in the others"


def describe(config: TrainConfig) -> str:
    """One line: what is predicted."""
    model, parallel = config.model, config.parallel
    members, gpus = parallel.members, parallel.world_size
    # The preset's name, if the shape is still the preset's.
    given = {"preset": model.preset}
    preset = ModelConfig.model_validate(given) if model.preset in PRESETS else None
    same = preset is not None and all(
        getattr(model, name) == getattr(preset, name) for name in PRESETS[model.preset]
    )
    fp8 = "" if config.fp8.recipe == "none" else f" with fp8 ({config.fp8.recipe})"
    words = [
        f"{model.preset if same else 'custom'} ({model.n_layers} layers, width {model.d_model})",
        f"{config.batch_size} x {config.seq_len} tokens "
        + ("a GPU" if members == 1 else f"over {members} GPUs"),
        f"{config.precision}{fp8}, loss {config.loss}, blocks {config.blocks}",
        "compiled" if config.compile else "eager",
        f"checkpointing {config.grad_checkpoint}{_blocks(config)}"
        + " with inputs on the host" * (config.saved_inputs == "host"),
        f"{gpus} GPU{'s' if gpus > 1 else ''}{_ways(parallel)}",
    ]
    return ", ".join(words)
