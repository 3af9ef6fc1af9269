"""`lsai predict`: peak memory and step time of a training run on any GPU, computed on any machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import pandas as pd
import typer
from tqdm import tqdm

from lsai_core.config import ModelConfig, TrainConfig
from lsai_core.errors import UserError
from lsai_core.files import deep_merge
from lsai_core.presets import PRESETS
from lsai_core.profiling.predict import GPUS, Gpu, Prediction, estimate, find_gpu, predict, verdict
from lsai_core.profiling.predict.prediction import OUTSIDE_GIB
from lsai_core.strict import validated
from lsai_lab import techniques as known_techniques
from lsai_lab.cli.options import BatchOption, ProfileOption, SetOption, overrides_from
from lsai_lab.environment import gpu_facts
from lsai_lab.files import repo_root
from lsai_lab.predicted import measured_ceilings
from lsai_lab.searches.longest_sequence import longest

_DEFAULTS: dict[str, Any] = {"precision": "bf16", "compile": True, "seq_len": 4096, "batch_size": 1}


@dataclass(frozen=True)
class Question:
    """What to predict: a study's variant, or a model by its preset's name, with overrides."""

    study: str | None
    variant: str | None
    model: str | None
    overrides: dict[str, Any]


def predict_command(
    study: Annotated[str | None, typer.Option("--study", help="Study in params/studies.")] = None,
    variant: Annotated[str | None, typer.Option("--variant", help="Variant of the study.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="A preset (lab, course, llama3-8b, ...), in bf16 and compiled, without a study."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="One GPU, e.g. rtx4090, h200, or its memory, e.g. 24GB; default: all known."),
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Shard over so many GPUs (parallel.fsdp).")] = None,
    techniques: Annotated[
        bool,
        typer.Option(
            "--techniques", help="Compare the techniques that save memory, and name the first that fits (minutes)."
        ),
    ] = False,
    find_longest: Annotated[
        bool, typer.Option("--longest", help="Find the longest sequence that fits the GPU (seq_len is ignored).")
    ] = False,
    batch_size: BatchOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    profile: ProfileOption = None,
    set_: SetOption = None,
) -> None:
    overrides = overrides_from(set_, batch_size)
    if gpus is not None:
        overrides = deep_merge(overrides, {"parallel": {"fsdp": gpus}})
    if not answer(Question(study, variant, model, overrides), gpu, profile, find_longest, techniques, as_json):
        raise typer.Exit(1)


def answer(
    question: Question, gpu: str | None, profile: str | None, find_longest: bool, techniques: bool, as_json: bool
) -> bool:
    """Print what is asked for: memory and time, or the longest sequence, or a comparison of techniques. False if it fits no GPU asked for."""
    target = None if gpu is None else find_gpu(gpu)
    config = _of_model(question) if question.study is None else _of_study(question, target, profile)
    if find_longest and techniques:
        raise UserError("--longest and --techniques are two questions; ask one of them")
    if find_longest:
        _show_longest(config, target or _this_gpu(), as_json)
    elif techniques:
        _show_techniques(config, target or _this_gpu())
    else:
        return not _show(config, predict(config), [target] if target else list(GPUS), as_json)
    return True


def _of_model(question: Question) -> TrainConfig:
    """A preset's model; needs no checkout."""
    if question.model is None:
        raise UserError("say what to predict: --study with --variant, or --model with a preset's name")
    if question.variant is not None:
        raise UserError("--variant belongs to a study; add --study, or leave it out")
    # Of the text nothing matters; the smallest vocabulary fits any model.
    data = {"data": {"vocab_size": 257}, **_DEFAULTS, "model": {"preset": question.model}}
    return validated(TrainConfig, deep_merge(data, question.overrides), f"--model {question.model}")


def _of_study(question: Question, target: Gpu | None, profile: str | None) -> TrainConfig:
    """A variant of a study as the GPU would run it, not as this machine would, unless a profile is named."""
    from lsai_lab.runs.session import Session
    from lsai_lab.runs.study import detect_profile, resolve, select_variants
    from lsai_lab.searches.model_search import ModelSearchConfig

    study, variant, overrides = question.study, question.variant, question.overrides
    if study is None or question.model is not None:
        raise UserError("say what to predict: --study with --variant, or --model with a preset's name")
    name = target.driver_name if target else gpu_facts()["gpu"] or "any GPU"
    session = Session(profile or detect_profile(repo_root(), name))
    loaded = session.study(study)
    chosen = select_variants(loaded, [variant] if variant else [next(iter(loaded.variants))], [])[0]
    for name, part in loaded.parts.items():
        if part.kind in ("train", "model_search") and chosen in loaded.measured(name):
            config = resolve(loaded, chosen, name, 0, overrides)
            if isinstance(config, TrainConfig):
                return config
            if isinstance(config, ModelSearchConfig) and config.measure == "train":
                return config.train  # with the study's model, from which the search lets it grow
    raise UserError(f"study {study} trains no variant {chosen} with this package's trainer")


def _this_gpu() -> Gpu:
    name = gpu_facts()["gpu"]
    if name is None:
        raise UserError(f"this machine has no GPU; say which one with --gpu: {', '.join(gpu.name for gpu in GPUS)}")
    return find_gpu(str(name))


def _time(config: TrainConfig, gpu: Gpu) -> dict[str, Any]:
    """Columns of an estimated step, by ceilings that the committed records of this GPU hold, where there is a checkout."""
    try:
        ceilings = measured_ceilings(gpu, repo_root() / "reports")
    except UserError:
        ceilings = {}
    time = estimate(config, gpu, ceilings)
    if time is None:
        return {"step s": None, "tokens/s": None, "ceilings": "none known"}
    return {"step s": time.step_s, "tokens/s": time.tokens_per_s, "ceilings": time.source}


def _show(config: TrainConfig, prediction: Prediction, gpus: list[Gpu], as_json: bool) -> bool:
    """True if it fits none of them."""
    rows = [
        {"GPU": gpu.name, "memory GiB": gpu.memory_gib, "share": prediction.needs / gpu.memory_gib,
         "verdict": verdict(prediction, gpu), **_time(config, gpu)}
        for gpu in gpus
    ]  # fmt: skip
    none_fits = all(row["verdict"] == "too large" for row in rows)
    if as_json:
        print(json.dumps({"peak_gib": prediction.peak, "needs_gib": prediction.needs, "reserved_gib": prediction.reserved,
                          "phases_gib": prediction.phases, "parts_gib": prediction.parts,
                          "host_gib": prediction.host, "gpus": rows}, indent=1))  # fmt: skip
        return none_fits
    print(describe(config))
    if len(gpus) == 1:
        spare = gpus[0].memory_gib - OUTSIDE_GIB - prediction.needs
        said = {"fits": f"Fits {gpus[0].name} with {spare:.1f} GiB to spare.",
                "tight": f"May fit {gpus[0].name}: {max(spare, 0):.1f} GiB to spare, less than predictions are sure of.",
                "too large": f"Does not fit {gpus[0].name}: {-spare:.1f} GiB are missing."}  # fmt: skip
        print(said[rows[0]["verdict"]])
    print(
        f"The allocator needs {prediction.needs:.2f} GiB of a GPU, and takes {prediction.reserved:.2f} where it can have them."
    )
    print(f"\nPredicted peak per GPU: {prediction.peak:.2f} GiB, at that moment")
    for name, size in prediction.parts.items():
        print(f"  {name:18}{size:9.2f}")
    print("Peaks of the phases: " + ", ".join(f"{name} {size:.2f}" for name, size in prediction.phases.items()))
    if prediction.host:
        print(f"In host memory, per GPU: {prediction.host:.2f} GiB")
    print("\n" + _table(pd.DataFrame(rows)))
    print(
        "share: of the least that the allocator needs. tokens/s of one GPU: estimated from its matmul, copy and link ceilings."
    )
    if none_fits:
        print("Too large: --techniques with --gpu shows what would fit, and how.")
    return none_fits


def _show_techniques(task: TrainConfig, gpu: Gpu) -> None:
    with tqdm(total=len(known_techniques.TECHNIQUES) + 1, unit="technique", leave=False, disable=None) as bar:

        def on_next(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        rows = known_techniques.compare(task, gpu, on_next)
    table = pd.DataFrame(
        {"technique": row.name, "GPUs": row.config.parallel.world_size, "peak GiB": row.prediction.peak,
         "host GiB": row.prediction.host or None, "verdict": verdict(row.prediction, gpu),
         **_time(row.config, gpu)}
        for row in rows
    )  # fmt: skip
    print(f"{describe(task)}\n\nOn {gpu.name} ({gpu.memory_gib:g} GiB):\n" + _table(table))
    first = known_techniques.first_that_fits(rows, gpu)
    if first is None:
        print("Nothing fits: take a shorter sequence, a smaller batch, a smaller model, or a larger GPU.")
    else:
        print(f"The first that fits: {first.name}, {first.prediction.peak:.1f} GiB.")
        if settings := known_techniques.settings_of(task, first):
            print("Its settings: " + " ".join(f"--set {pair}" for pair in settings))


def _show_longest(config: TrainConfig, gpu: Gpu, as_json: bool) -> None:
    found = longest(config, gpu)
    time = _time(found.config, gpu)
    peak, gpus = found.prediction.peak, found.config.parallel.world_size
    if as_json:
        print(json.dumps({"tokens": found.tokens, "limited_by_memory": found.limited, "gpus": gpus, "peak_gib": peak,
                          "host_gib": found.prediction.host, "gpu": gpu.name, **time}, indent=1))  # fmt: skip
        return
    print(describe(found.config))
    print(f"\nThe longest sequence on {gpus} x {gpu.name} ({gpu.memory_gib:g} GiB): {found.tokens:,} tokens")
    print(f"  predicted peak per GPU {peak:9.1f} GiB ({peak / gpu.memory_gib:.0%})")
    print(f"  host memory per GPU    {found.prediction.host:9.1f} GiB, in all {found.host_gib:.1f} GiB")
    if time["step s"] is not None:
        print(f"  a step, estimated      {time['step s']:9.0f} s ({time['ceilings']})")
    if not found.limited:
        print("Memory would take longer ones; positions beyond are not exact in the rotary embedding's fp32.")


def _table(frame: pd.DataFrame) -> str:
    formats = {"share": "{:.0%}".format, "step s": "{:.3g}".format, "tokens/s": "{:,.0f}".format, "peak GiB": "{:.1f}".format,
               "host GiB": "{:.1f}".format}  # fmt: skip
    text = frame.dropna(axis="columns", how="all")
    return text.to_string(index=False, na_rep="", formatters={k: v for k, v in formats.items() if k in text})


def describe(config: TrainConfig) -> str:
    """One line: what is predicted."""
    model = config.model
    words = [
        f"{_name(model)} ({model.n_layers} layers, width {model.d_model})",
        f"{config.batch_size} x {config.seq_len} tokens "
        + ("a GPU" if config.parallel.cp == 1 else f"over {config.parallel.cp} GPUs"),
        config.precision if config.fp8.recipe == "none" else f"{config.precision} with fp8 ({config.fp8.recipe})",
        f"loss {config.loss}",
        f"blocks {config.blocks}",
        "compiled" if config.compile else "eager",
        f"checkpointing {config.grad_checkpoint}"
        + (" with inputs on the host" if config.saved_inputs == "host" else ""),
        f"{config.parallel.world_size} GPU{'s' if config.parallel.world_size > 1 else ''}",
    ]
    return ", ".join(words)


def _name(model: ModelConfig) -> str:
    """The preset's name, if the shape is still the preset's."""
    shape = model.model_dump()
    same = all(shape[name] == value for name, value in PRESETS.get(model.preset, {}).items())
    return model.preset if same else "custom"
