"""How words of a notebook become a plan: overrides as a person or papermill gives them, which part
of a study is meant where none is named, and what a person calls a run."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator

from lsai_core.base.errors import UserError
from lsai_core.config.strict import Strict, deep_merge, flatten, nested, validated
from lsai_lab.project.files import listed, parse_value
from lsai_lab.runs.schema import Text
from lsai_lab.runs.study import Study, matching


def first_part(study: Study, variants: Sequence[str]) -> str:
    """The first part that measures one of the variants (names or patterns); the first of all, where
    none does."""
    parts = [part for part in study.parts if matching(study.measured(part), variants)]
    return next(iter(parts or study.parts))


def as_mapping(overrides: Any) -> Any:
    """Overrides as papermill gives them on its command line: a text of YAML is read."""
    if isinstance(overrides, Strict):  # the config of a plan, a prediction or a run
        return overrides.model_dump(mode="json")
    if isinstance(overrides, str):
        return parse_value(overrides) if overrides else {}
    return {} if overrides is None else overrides


def as_nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides by dotted key as one nested mapping; a text is read as on the command line, for
    papermill reads `1e-3` as YAML 1.1 does, as a text. UserError for what is no mapping."""
    if not isinstance(overrides, Mapping):
        said = 'overrides is a mapping from settings to values, {"seq_len": 4096}'
        raise UserError(f"{said}, not {overrides!r:.80}")
    changes: dict[str, Any] = {}
    for key, value in flatten(dict(overrides)).items():
        read = parse_value(value) if isinstance(value, str) else plain(value)
        changes = deep_merge(changes, nested(key, read))
    return changes


def plain(value: Any) -> Any:
    """A number of NumPy or torch as one of Python, an array of them as a list; all else as it
    is."""
    is_array = hasattr(value, "tolist") and hasattr(value, "dtype")
    return value.tolist() if is_array else value


def _own_name(name: str) -> str:
    """`name`, if it cannot be read as something else: `machine/study.run` is a recorded run, and a
    comma stands between names."""
    if found := [mark for mark in ("/", ",") if mark in name]:
        raise ValueError(
            f"{name!r} cannot be the name of a run: {found[0]!r} stands in the addresses of "
            "recorded runs or between names"
        )
    return name


class _About(Strict):
    """What a person calls a run."""

    name: Annotated[Text, AfterValidator(_own_name)] | None = None
    tags: list[Text] = []
    note: Text | None = None


def checked_about(given: Mapping[str, Any]) -> dict[str, Any]:
    """`name`, `tags` and `note`, as far as they are given, as `run.json` keeps them; a single tag
    becomes a list. UserError for anything but texts, and for a name that could be the address of
    another run."""
    told = dict(given)
    if isinstance(tags := told.get("tags"), str | tuple | set):
        told["tags"] = listed(tags)
    return validated(_About, told, "what the run is called").model_dump(exclude_unset=True)


def about(name: str | None, tags: Sequence[str], note: str | None) -> dict[str, Any]:
    """What a person calls a run, as far as it was given. UserError for anything but texts."""
    told = checked_about({"name": name, "tags": tags, "note": note})
    return {key: value for key, value in told.items() if value}
