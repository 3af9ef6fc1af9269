"""`lsai plan`: the fastest setting that fits a GPU or a budget, why, and how to run it."""

import json
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from lsai_core.config.train import TrainConfig
from lsai_core.profiling.gpus import MARGIN
from lsai_lab.cli import options as opt
from lsai_lab.cli.tables import say
from lsai_lab.predictions.asked import Source


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
        help="GiB that PyTorch may reserve on each GPU; all of --gpu by default.",
    ),
]
MarginOption = Annotated[
    float,
    typer.Option(
        help="Share of the memory (of 10 GiB at least) that stays free: predictions are that true.",
    ),
]
NumericsOption = Annotated[
    NumericsName,
    typer.Option(
        help="fp32: weights and states in fp32, matmuls in bf16. harmless: also 8-bit states and "
        "bf16 weights rounded stochastically, which changed no loss that the report measured. fp8: "
        "also matmuls in fp8.",
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
    study: opt.StudyOption = None,
    variant: opt.VariantOption = None,
    model: opt.ModelOption = None,
    hf: opt.HfOption = None,
    tokens: TokensOption = None,
    seq_len: LengthOption = None,
    gpu: opt.GpuOption = None,
    gpus: opt.GpusOption = None,
    budget: BudgetOption = None,
    numerics: NumericsOption = NumericsName.harmless,
    margin: MarginOption = MARGIN,
    installed: opt.InstalledOption = None,
    passport: opt.PassportOption = None,
    write_yaml: YamlOption = None,
    torchtitan: TitanOption = None,
    hf_args: ArgumentsOption = None,
    as_json: opt.JsonOption = False,
    profile: opt.ProfileOption = None,
    set_: opt.SetOption = None,
) -> None:
    from lsai_lab.predictions.plan_asked import ask as question_of
    from lsai_lab.predictions.plan_asked import shown_tries
    from lsai_lab.predictions.plan_files import arguments_file, study_file, titan_file
    from lsai_lab.predictions.plan_told import told

    source = Source(study, variant, model, hf, profile=profile)
    question = question_of(
        source,
        opt.overrides_from(set_),
        tokens=tokens,
        seq_len=seq_len,
        gpu=gpu,
        gpus=gpus,
        budget=budget,
        numerics=numerics.value,
        margin=margin,
        packages=installed,
        passport=passport,
    )
    files = [
        *([study_file(write_yaml)] if write_yaml else []),
        *([titan_file(torchtitan, question.config.model)] if torchtitan else []),
        *([arguments_file(hf_args)] if hf_args else []),
    ]
    with shown_tries(sys.stderr) as on_next:
        found = question.answer(on_next)
        result = told(found) | {"remarks": question.remarks}
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


def _print(result: dict[str, Any], source: Source) -> None:
    from lsai_core.config.strict import changed_settings
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
