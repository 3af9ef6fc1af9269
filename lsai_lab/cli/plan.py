"""`lsai plan`: the fastest setting that fits a GPU or a budget, why, and how to run it."""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from lsai_core.base.errors import UserError
from lsai_core.config.train import TrainConfig
from lsai_core.model.hf_config import AnotherModel
from lsai_core.profiling.gpus import MARGIN, Gpu, find_gpu
from lsai_lab.cli import asked as ask
from lsai_lab.cli import options as opt
from lsai_lab.cli.tables import say
from lsai_lab.machine.environment import gpu_facts
from lsai_lab.predictions.asked import Asked, Source, sizes_that_exist
from lsai_lab.project.files import merged

_QUIET_S = 2.0  # an answer that takes longer says what it tries
_MOST_MARGIN = 0.5


class NumericsName(StrEnum):
    """How far a plan may go from fp32."""

    fp32 = "fp32"
    harmless = "harmless"
    fp8 = "fp8"


TokensOption = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens of an optimizer step, over all GPUs; a study's by default."),
]
LengthOption = Annotated[int | None, typer.Option(min=2, help="Tokens of a sequence.")]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        help="GiB that PyTorch may reserve on each GPU; all of --gpu by default.",
    ),
]
MarginOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=_MOST_MARGIN,
        help="Share of the memory that stays free, for predictions are that true.",
    ),
]
NumericsOption = Annotated[
    NumericsName,
    typer.Option(
        help="fp32: weights and states in fp32, products in bf16. harmless: also 8-bit states and "
        "bf16 weights rounded stochastically, which changed no loss that the report measured. fp8: "
        "also products in fp8.",
    ),
]
YamlOption = Annotated[
    Path | None, typer.Option(help="Write a study for `lsai train`: params/studies/NAME.yaml.")
]
TitanOption = Annotated[Path | None, typer.Option(help="Write torchtitan's TOML (0.2).")]
ArgumentsOption = Annotated[
    Path | None, typer.Option(help="Write transformers' TrainingArguments: FILE.py or FILE.json.")
]


def plan(
    study: ask.StudyOption = None,
    variant: ask.VariantOption = None,
    model: ask.ModelOption = None,
    hf: ask.HfOption = None,
    tokens: TokensOption = None,
    seq_len: LengthOption = None,
    gpu: ask.GpuOption = None,
    gpus: ask.GpusOption = None,
    budget: BudgetOption = None,
    numerics: NumericsOption = NumericsName.harmless,
    margin: MarginOption = MARGIN,
    installed: ask.InstalledOption = None,
    write_yaml: YamlOption = None,
    torchtitan: TitanOption = None,
    hf_args: ArgumentsOption = None,
    as_json: opt.JsonOption = False,
    profile: opt.ProfileOption = None,
    set_: opt.SetOption = None,
) -> None:
    from lsai_lab.predictions.plan import Room, make_plan
    from lsai_lab.predictions.plan_files import arguments_file, study_file, titan_file
    from lsai_lab.predictions.plan_space import with_usual_vocabulary
    from lsai_lab.predictions.plan_told import told

    fixed = merged(opt.overrides_from(set_), {} if seq_len is None else {"seq_len": seq_len})
    target = _target(gpu, budget)
    source = Source(study, variant, model, hf, profile=profile)
    asked = _asked(source, gpu, gpus, fixed)
    config = with_usual_vocabulary(asked.config)
    if tokens is None and study is None:
        some = 32 * config.seq_len * config.parallel.readers
        raise UserError(f"say how many tokens an optimizer step has: --tokens {some}, for example")
    files = [
        *([study_file(write_yaml)] if write_yaml else []),
        *([titan_file(torchtitan, config.model)] if torchtitan else []),
        *([arguments_file(hf_args)] if hf_args else []),
    ]
    with sizes_that_exist(config), _progress() as on_next:
        found = make_plan(
            config,
            tokens or config.tokens_per_step,
            Room(target, budget, margin),
            allowed=numerics.value,
            fixed=fixed,
            packages=installed,
            on_next=on_next,
        )
        result = told(found) | {"remarks": asked.remarks}
        chosen = found.chosen
        result["files"] = [
            file.write(chosen.config, result["answer"]) for file in files if chosen is not None
        ]
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        _print(result, source)
    if chosen is None:
        raise typer.Exit(1)


def _target(gpu: str | None, budget: float | None) -> Gpu:
    """The GPU of the plan: the one named, else this machine's, else any with the budget's memory.
    UserError where nothing says how much memory there is."""
    if gpu is not None:
        return find_gpu(gpu)
    here = gpu_facts()["gpu"]
    if here is not None:
        return find_gpu(str(here))
    if budget is None:
        raise UserError("say how much memory there is: --gpu, for example h100, or --budget (GiB)")
    from lsai_lab.predictions.plan import gpu_with

    return gpu_with(budget)


def _asked(source: Source, gpu: str | None, gpus: int | None, overrides: dict[str, Any]) -> Asked:
    try:
        return source.run(gpu, gpus, overrides)
    except AnotherModel as error:
        raise UserError(
            f"{error}; `lsai predict --hf` predicts a step of it, for one micro-batch at a time"
        ) from None


@contextmanager
def _progress() -> Iterator[Any]:
    """Yields what is to be told each setting that is tried; after two seconds it is shown."""
    with tqdm(unit=" settings", leave=False, delay=_QUIET_S, file=sys.stderr, disable=None) as bar:

        def on_next(words: str) -> None:
            bar.set_description_str(words, refresh=False)
            bar.update()

        yield on_next


def _print(result: dict[str, Any], source: Source) -> None:
    from lsai_lab.predictions.plan_space import changed_settings
    from lsai_lab.predictions.plan_told import lines

    print(result["answer"])  # one line, however long
    for remark in result["remarks"]:
        say(f"Note: {remark}.")
    for line in lines(result):
        print() if not line else say(line, "    ")
    if result["plan"] is None:
        return
    print("\nTo run it:")
    for file in result["files"]:
        needed, usable = file["reserved_gib"], result["usable_gib"]
        print(f"  written: {file['path']}")
        if needed is not None and needed > usable:
            say(
                f"    Its trainer keeps more: with this file it is predicted to reserve "
                f"{needed:.1f} GiB, {needed - usable:.1f} too much.",
                "    ",
            )
    if not result["files"]:
        say("  --write-yaml FILE, --torchtitan FILE or --hf-args FILE writes it for a trainer.")
    asked = source.run(None, result["gpus"] if result["gpus"] > 1 else None, {}).config
    chosen = TrainConfig.model_validate(result["plan"]["config"])
    words = [
        f"--{name} {shlex.quote(str(value))}"
        for name in ("study", "variant", "model", "hf", "profile")
        if (value := getattr(source, name)) is not None
    ]
    words += [f"--gpus {result['gpus']}"] * (result["gpus"] > 1)
    words += [
        f"--set {key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in changed_settings(asked, chosen).items()
        if not key.startswith("data.")
    ]
    say(f"  its prediction: lsai predict {' '.join(words)}", "    ")
