"""What a person asks memory and time of, in one word or several: a preset, a study's variant, a
run, or a Hugging Face configuration; and errors in the words of a Python call."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lsai_core.base.errors import UserError, did_you_mean
from lsai_core.base.plugins import own_fault
from lsai_core.config.model import PRESETS, ModelConfig
from lsai_core.config.train import TrainConfig
from lsai_core.model.hf_config import CONFIG
from lsai_core.training.combinations import checked
from lsai_lab.interactive.run import Run, find_run
from lsai_lab.predictions.asked import DEFAULTS, Source
from lsai_lab.report.load import names_of_studies, session
from lsai_lab.report.studies import study
from lsai_lab.runs.find import begun, given_names

# Options of the command line, and their arguments where those are called otherwise.
_ARGUMENTS = {"model": "what", "set": "overrides", "config": "hf"}
_OPTION = re.compile(r"(`[^`]*`)|--([a-z]+(?:-[a-z]+)*)(?: (?=[\d']))?(\d[\d,]*|'[^']*')?")


def meant(what: str) -> Source | Run:
    """The preset of that name, else the study's variant, else the run, else the folder or file of a
    Hugging Face configuration. UserError if there is none."""
    if what in PRESETS:
        return Source(model=what)
    name, _, variant = what.partition(".")
    if name in names_of_studies():
        return Source(study=name, variant=variant or None)
    inside: list[str] = []
    try:
        return find_run(what)
    except UserError as error:
        path = Path(what).expanduser()
        if not str(error).startswith("no run ") and not path.exists():
            raise  # several runs, or none that can be read
        if path.is_file() or (path / CONFIG).is_file():
            return Source(hf=path)
        machine, *inside = what.split("/")
        if inside and machine and (session().root / "reports" / "recorded" / machine).is_dir():
            raise
    if len(inside) > 1:
        raise UserError(f"there is no folder or file {what!r}")
    if len(inside) == 1:  # as a model is called on the Hub
        raise UserError(
            f"no run and no folder {what!r}; for a model of Hugging Face name the folder of its "
            f'{CONFIG}: hf="folder"'
        )
    near = did_you_mean(what, _known()) or f"presets: {', '.join(PRESETS)}"
    raise UserError(f"no preset, study, variant or run {what!r}; {near}")


def source_of(what: Any, named: Mapping[str, Any]) -> Any:
    """What is asked for: a `Source`, or `what` itself where that is a run or a TrainConfig. `named`
    are `study`, `variant`, `hf` and `profile`. UserError where both say it."""
    given = {name: value for name, value in named.items() if value is not None}
    if what is None:
        return Source(**given | ({"hf": Path(given["hf"])} if "hf" in given else {}))
    if more := [name for name in given if name != "profile"]:
        raise UserError(f"say what is asked for in one way: what, or {' with '.join(more)}")
    if isinstance(what, ModelConfig):
        what = checked(TrainConfig, DEFAULTS | {"model": what.model_dump()}, "the model")
    found = meant(what) if isinstance(what, str) else what
    if not given:
        return found
    if not isinstance(found, Source):
        raise UserError("profile belongs to a study; leave it out")
    return replace(found, profile=given["profile"])


def gpu_words(gpu: str | float | None, what: Any = None) -> str | None:
    """A GPU by its name; a number is its memory in GiB. UserError for anything else, also where it
    stands in the place of `what`, the model."""
    both_names = isinstance(gpu, str) and isinstance(what, str)
    if both_names and gpu in (*PRESETS, *names_of_studies()):
        raise UserError(f"the GPU is the second argument, the model the first: {gpu!r}, {what!r}")
    if isinstance(gpu, int | float) and not isinstance(gpu, bool):
        return f"{gpu:g}GiB"
    if gpu is None or isinstance(gpu, str):
        return gpu
    raise UserError(f'gpu is a name, such as "h100", or its memory in GiB, not {gpu!r}')


def require_numbers(given: Mapping[str, Any], kind: type, words: str) -> None:
    """UserError for an argument that is neither None nor a number of this `kind` above 0."""
    for name, number in given.items():
        is_one = isinstance(number, kind) and not isinstance(number, bool)
        if number is not None and not (is_one and number > 0):  # type: ignore[operator]
            raise UserError(f"{name} is {words}, not {number!r}")


def _known() -> list[str]:
    """The names that can be meant, without those of recorded runs."""
    variants = [
        f"{name}.{variant}" for name in names_of_studies() for variant in study(name).variants
    ]
    runs = [name for folder in begun(session().runs_root) for name in given_names(folder)]
    return [*PRESETS, *names_of_studies(), *variants, *runs]


@contextlib.contextmanager
def said_in_python() -> Iterator[None]:
    """An error that names an option of the command line names the argument instead: `--tokens 8` is
    `tokens=8`, `--gpu` is `gpu`. Commands between backticks stay. What a technique of the
    laboratory raises becomes one line that says where."""
    try:
        yield
    except UserError as error:
        raise UserError(_OPTION.sub(_argument, str(error))) from None
    except Exception as error:
        if (fault := own_fault(error)) is None:
            raise
        raise UserError(fault) from error


def _argument(found: re.Match[str]) -> str:
    command, option, value = found.groups()
    if command:
        return str(command)
    name = _ARGUMENTS.get(option, option.replace("-", "_"))
    return f"{name}={value.replace(',', '')}" if value else name
