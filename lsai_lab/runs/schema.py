"""What the files of a record may hold. Whoever reads a record gets these types, or one line that
says what is wrong.

A record may come from anywhere, so nothing in it is taken on trust: a file is a plain file of a
limited size, numbers are numbers that can be measured, and no result bears the name of something
that says which run it is.
"""

from __future__ import annotations

import functools
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError
from typing_extensions import TypeAliasType, TypedDict

from lsai_core.base.errors import UserError
from lsai_lab.project.files import Name, one_line

LARGEST = 1e39  # fp32 ends at 3.4e38, and no time, size or rate comes near it
MOST_BYTES = {"metrics.jsonl": 2**30}  # of a file
USUAL_BYTES = 2**24

Text = Annotated[str, Field(max_length=20_000)]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Size = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Scalar = bool | Integer | Size | Text | None
# The name of a result, a setting or a column: it becomes the name of a column in frames.
Word = Annotated[str, Field(pattern=r"^\w+$", max_length=100)]
Key = Annotated[str, Field(pattern=r"^[\w./+ -]+$", max_length=100)]
Json = TypeAliasType("Json", "Scalar | list[Json] | dict[Key, Json]")

# What says which run it is, where it ran and how it ended: columns of every frame of runs.
IDENTITY = (
    "machine",
    "own",
    "study",
    "variant",
    "label",
    "part",
    "repeat",
    "outcome",
    "reason",
    "key",
    "kind",
    "started",
    "wall_s",
    "run",
)
# What a run was planned with, and what a person calls it: columns, too, before a result of the
# same name.
ABOUT = ("profile", "name", "tags", "note")
# The first columns of a frame of runs, as far as they are there.
FIRST = (
    *("machine", "study", "variant", "label", "name", "differs", "part", "repeat", "outcome"),
    *("tokens_per_s", "step_ms", "mem_peak_allocated_gib", "validation_loss"),
    *("largest_batch", "largest_size", "points_ok", "matmul_bf16_tflops", "disturbed", "run"),
)
DERIVED = ("gpu", "main", "differs", "path")
BOTH = ("steps", "device")  # results of trainings and settings; a frame has these as `config.steps`

_NUMBER = re.compile(
    r"_(m?s|gib|mib|tflops|mhz|w|n|share|size|spread|mean|min|max|p\d+)$|_per_|_(loss|perplexity|resolution|balance|causal|cores|threads|tokens|measured|timed)$|_share_|_gib_"
    r"|^(mfu|loss|steps|tokens|tflops|parameters|world_size|largest_batch|points|n_layers|d_model|lr)$|^points_|^grad_norm"
)


_ABOVE_0 = ("step_ms", "tokens_per_s", "parameters")  # what others are divided by


def _results(given: dict[str, Any]) -> dict[str, Any]:
    """Refuse a result that has the name of another fact, or is no size where its name has a
    unit."""
    for name, value in given.items():
        if name in IDENTITY or name in DERIVED:
            raise ValueError(f"{name!r} says which run this is and cannot be a result")
        if value is None:  # not measured: a run of few steps has no speed
            continue
        if _NUMBER.search(name) and (type(value) not in (int, float) or value < 0):
            raise ValueError(f"{name!r} must be a number, and none below 0")
        if name in _ABOVE_0 and not value:
            raise ValueError(f"{name!r} must be above 0")
    return given


if TYPE_CHECKING:  # whoever reads a result knows by its name what it is
    Results = dict[str, Any]
else:
    Result = Scalar | list[Scalar] | list[dict[Word, Scalar | list[Scalar]]]
    Results = Annotated[dict[Word, Result], Field(max_length=5_000), AfterValidator(_results)]
Config = dict[Key, Json]


class Environment(BaseModel, extra="allow"):
    """`env.json`: what is read of it by name."""

    __pydantic_extra__: dict[str, Json]
    machine: Name | None = None
    host: Text | None = None
    gpu: Text | None = None
    gpu_count: Integer = 0
    gpu_memory_gib: Size | None = None
    gpu_uuids: list[Text] = []
    cpu: Text | None = None
    cpu_cores: Integer | None = None
    torch: Text | None = None
    packages: dict[Key, Text] = {}


class Plan(BaseModel, extra="allow"):
    """`run.json`: how the run was planned, and what a person calls it."""

    __pydantic_extra__: dict[str, Json]
    label: Text = ""
    command: Text = ""
    machine: Text = ""
    inputs: dict[str, Text] = {}
    name: Text | None = None
    also_named: list[Text] = []
    note: Text | None = None
    tags: list[Text] = []


Kernel = TypedDict("Kernel", {"name": Text, "class": Text, "ms": Size, "calls": Size}, total=False)


class Kernels(BaseModel):
    """`kernels.json`: of each kernel its name, its class, and milliseconds and calls per step."""

    per: Annotated[str, Field(pattern="^step$")]
    kernels: list[Kernel]


# A loss may be NaN or infinite, which the rows keep.
Row = dict[str, bool | Integer | float | Text | list[Json] | None]
# What every row of a kind's `metrics.jsonl` has, and is not null; a kind that is not named here is
# not looked into.
_COLUMNS: dict[str, frozenset[str]] = {
    "train": frozenset({"step", "loss", "step_ms", "tokens_in_step"}),
    "peer": frozenset({"step", "loss", "step_ms", "tokens_in_step"}),
    "attention": frozenset({"step", "measure", "backend", "outcome"}),
    "context": frozenset({"step", "measure", "method", "length", "batch", "outcome"}),
    "gemm": frozenset({"step", "layer", "product", "way", "m", "n", "k", "outcome"}),
    "batch_search": frozenset({"step", "size", "outcome"}),
    "model_search": frozenset({"step", "size", "outcome"}),
}
_PLACE = frozenset({"mask", "window", "length"})  # of an attention's point
_TEXTS = {"measure", "backend", "method", "outcome", "mask", "layer", "product", "way", "kernel"}

T = TypeVar("T")
_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def read_as(path: Path, schema: type[T]) -> T:
    """The JSON file `path`, if it is what `schema` says.

    Raises FileNotFoundError if there is none, UserError in one line for any other fault.
    """
    return _checked(path, content(path), schema)


def read_rows(path: Path, kind: str, may_be_cut: bool) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, each with what a run of `kind` measures (empty: anything).
    Raises as `read_as` does.

    `may_be_cut`: the last line of a run that died may not be whole, and is left out.
    """
    data = content(path)
    lines = [line for line in data.splitlines() if line.strip()]
    if may_be_cut and lines and not data.endswith(b"\n") and not _is_json(lines[-1]):
        lines.pop()
    rows = _checked(path, b"[" + b",".join(lines) + b"]", list[Row])
    needed = _COLUMNS.get(kind, frozenset())
    for row in rows:
        if not needed <= row.keys():
            raise _damaged(path, f"a row has no {min(needed - row.keys())!r}")
        if kind == "attention" and row["measure"] != "backend" and not row.keys() >= _PLACE:
            raise _damaged(path, f"a row has no {min(_PLACE - row.keys())!r}")
    for name, type_ in {(name, type(value)) for row in rows for name, value in row.items()}:
        if not re.fullmatch(r"\w{1,100}", name):
            raise _damaged(path, f"{name[:100]!r} is no name of a column")
        if type_ is type(None) and name in needed:  # others are null where nothing was measured
            raise _damaged(path, f"{name!r} is missing in a row")
        if type_ in (str, list, bool) and _NUMBER.search(name) and not name.startswith("rank_"):
            raise _damaged(path, f"{name!r} must be a number")
        if needed and name in _TEXTS and type_ not in (str, type(None)):
            raise _damaged(path, f"{name!r} must be text")
    return rows


def content(path: Path) -> bytes:
    """What a plain file of a reasonable size holds. FileNotFoundError if there is none, UserError
    for anything else."""
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise _damaged(path, "it is no plain file")
        if facts.st_size > MOST_BYTES.get(path.name, USUAL_BYTES):
            raise _damaged(path, f"{facts.st_size:,} bytes are too many")
        return path.read_bytes()
    except FileNotFoundError:
        if path.is_symlink():
            raise _damaged(path, "a link that leads nowhere") from None
        raise
    except OSError as error:
        raise _damaged(path, str(error.strerror or error)) from None


def _checked(path: Path, data: bytes, schema: Any) -> Any:
    try:
        return _adapter(schema).validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise _damaged(path, f"{where + ': ' if where else ''}{first['msg']}") from None


def _damaged(path: Path, why: str) -> UserError:
    remedy = "restore it from a copy, or delete its folder and run it again"
    return UserError(f"{one_line(str(path))} is damaged ({one_line(why, 200)}); {remedy}")


def _is_json(line: bytes) -> bool:
    try:
        _adapter(Any).validate_json(line)
    except ValidationError:
        return False
    return True
