"""From `params/` to a plan: which runs a study consists of on this machine, each (variant x part x
repeat) fully resolved."""

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from lsai_core.base import tables
from lsai_core.base.errors import UserError, hint
from lsai_core.config.strict import Strict, deep_merge, flatten, nested, validated
from lsai_core.config.train import Seconds
from lsai_core.training.combinations import checked
from lsai_lab.project.files import Name, load_yaml, named
from lsai_lab.runs.described import Described, words
from lsai_lab.runs.inputs import code_facts, key_config, resolved_paths, run_inputs
from lsai_lab.runs.kinds import get_kind
from lsai_lab.runs.records import RunId, run_key


class Part(Strict):
    """One thing that is measured of every variant, or of some."""

    kind: str = "train"
    variants: list[str] = Field(
        [], description="of which it is measured, also patterns like grid_*; empty: all"
    )
    repeats: int = Field(1, gt=0, le=10_000, description="runs with seeds seed, seed+1, ...")
    timeout_s: Seconds = Field(
        3600.0, description="a run that takes longer is ended and recorded as timeout"
    )
    settings: dict[str, Any] = {}


class Variant(Strict):
    """One technique: how it is called in tables and what it changes in the base config."""

    label: str
    note: str = ""
    config: dict[str, Any] = {}


class Axis(Strict):
    """One key of the config that a sweep varies."""

    key: str = Field(description="with dots, as for --set: parallel.fsdp")
    values: list[str | int | float | bool] = Field(min_length=1)


class Sweep(Strict):
    """A variant for every combination of the axes' values; `name` and `label` hold the axes' names
    in braces."""

    name: str
    label: str
    note: str = ""
    config: dict[str, Any] = Field(
        {}, description="what all of its variants change in the base config"
    )
    axes: dict[str, Axis] = Field(min_length=1)

    @model_validator(mode="after")
    def _every_axis_is_named(self) -> Self:
        for what, text in (("name", self.name), ("label", self.label)):
            try:
                text.format(**{axis: spec.values[0] for axis, spec in self.axes.items()})
            except (KeyError, IndexError, ValueError) as error:
                raise ValueError(f"{what} {text!r} refers to {error}, which is no axis") from None
        if missing := [axis for axis in self.axes if f"{{{axis}}}" not in self.name]:
            raise ValueError(
                f"name {self.name!r} does not hold {{{missing[0]}}}, so variants would share a name"
            )
        return self

    def variants(self) -> dict[str, dict[str, Any]]:
        """The variants as a study file would hold them, the last axis fastest."""
        made = {}
        for values in itertools.product(*(axis.values for axis in self.axes.values())):
            words, config = dict(zip(self.axes, values, strict=True)), self.config
            for axis, value in words.items():
                config = deep_merge(config, nested(self.axes[axis].key, value))
            label = self.label.format(**words)
            made[self.name.format(**words)] = {"label": label, "note": self.note, "config": config}
        return made


# Fields of a study that say how it is run and told, which no reader asks for.
_OF_THE_FILE = ("first", "recorded_on", "study", "sweeps")


class Study(Strict):
    """`params/studies/<study>.yaml` with the profile laid over it."""

    study: Name
    title: str
    question: str
    baseline: str | None = Field(None, description="the variant that the others are compared with")
    first: list[str] = Field(
        ["*"], description="the runs of a first answer, by name or pattern (baseline, *_2.grid)"
    )
    parts: Annotated[dict[Name, Part], AfterValidator(Described)]
    recorded_on: dict[str, str] = Field(
        {}, description="by part: whose runs in reports/recorded the chapters tell (a label)"
    )
    base: dict[str, Any] = {}
    sweeps: dict[str, Sweep] = {}
    variants: Annotated[dict[Name, Variant], AfterValidator(Described)]

    @model_validator(mode="before")
    @classmethod
    def _sweep(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("sweeps"), dict):
            return data
        variants = dict(data.get("variants") or {})
        for name, spec in data["sweeps"].items():
            try:
                made = Sweep.model_validate(spec).variants()
            except ValidationError:
                return data  # is told with its place when the field is validated
            if twice := [variant for variant in made if variant in variants]:
                raise ValueError(f"sweep {name} makes {twice[0]!r}, which is a variant already")
            variants |= made
        return {**data, "variants": variants}

    @model_validator(mode="after")
    def _baseline_exists(self) -> Self:
        if self.baseline is not None and self.baseline not in self.variants:
            raise ValueError(
                f"baseline {self.baseline!r} is no variant; there are {', '.join(self.variants)}"
            )
        if others := [name for name in self.recorded_on if name not in self.parts]:
            raise ValueError(f"recorded_on: {others[0]!r} is no part{hint(others[0], self.parts)}")
        for name, part in self.parts.items():
            if unknown := unmatched(self.variants, part.variants):
                known = ", ".join(self.variants)
                raise ValueError(
                    f"part {name} names {unknown[0]!r}, which is no variant; there are {known}"
                )
        return self

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _OF_THE_FILE]

    def _parts(self) -> list[tables.Part]:
        """Title and question; the parts; the variants with what each changes."""
        parts = [
            (name, part.kind, part.repeats, len(self.measured(name)))
            for name, part in self.parts.items()
        ]
        variants = [
            (name, spec.label, spec.note, words(spec.config))
            for name, spec in self.variants.items()
        ]
        told = f"{self.question} Compared with: {self.baseline or 'nothing'}."
        heads = ("variant", "label", "note", "settings")
        base = list(flatten(self.base).items())
        return [
            tables.Part(f"{self.study}: {self.title}", note=told),
            tables.Part("Parts", ("part", "kind", "repeats", "variants"), parts),
            tables.Part("Variants", heads, variants),
            tables.Part("Settings of all", ("setting", "value"), base, folded=True),
        ]

    def measured(self, part: str) -> list[str]:
        """The variants of which `part` is measured."""
        patterns = self.parts[part].variants
        return matching(self.variants, patterns) if patterns else list(self.variants)


class Profile(Strict):
    """`params/profiles/<profile>.yaml`: the sizes that suit a machine."""

    profile: Name
    description: str
    gpu: str | None = Field(
        None, description="detected where the GPU's name contains this; null: no GPU; '*': any GPU"
    )
    studies: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True)
class PlannedRun:
    """One run, ready to be executed in `folder`."""

    id: RunId
    kind: str
    config: Strict
    label: str
    timeout_s: float
    folder: Path
    code: dict[str, Any]
    # the machine's fingerprint and the ids of what the run reads: both are in the key
    machine: str = ""
    inputs: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.id)


def load_profile(root: Path, name: str) -> Profile:
    """Read a profile by name; UserError lists the known ones."""
    values, where = _described(root, "profile", "profiles", name)
    profile = validated(Profile, values, where)
    studies = study_names(root)
    if unknown := [study for study in profile.studies if study not in studies]:
        raise UserError(
            f"{where}: there is no study {unknown[0]!r} to change{hint(unknown[0], studies)}"
        )
    return profile


def detect_profile(root: Path, gpu_name: str | None) -> str:
    """The profile for this machine: one whose `gpu` is part of the GPU's name, else `gpu` for any
    (a slice of a GPU has not its sizes), else `cpu`."""
    if gpu_name is None:
        return "cpu"
    if " MIG " in gpu_name:
        return "gpu"
    for path in sorted((root / "params" / "profiles").glob("*.yaml")):
        wanted = load_profile(root, path.stem).gpu
        if wanted not in (None, "*") and wanted.lower() in gpu_name.lower().replace(" ", ""):
            return path.stem
    return "gpu"


def load_study(root: Path, name: str, profile: Profile | None = None) -> Study:
    """Read a study with the profile's changes laid over it, if any; UserError names the file and
    key that is wrong."""
    values, where = _described(root, "study", "studies", name)
    changes = profile.studies.get(name, {}) if profile else {}
    where += f" with profile {profile.profile}" if profile and changes else ""
    study = validated(Study, deep_merge(values, changes), where)
    if study.study != name:
        raise UserError(
            f"{where}: study is {study.study!r}, but the file is called {name}.yaml; make them "
            f"equal"
        )
    return study


def _described(root: Path, what: str, folder: str, name: str) -> tuple[dict[str, Any], str]:
    """What `params/<folder>/<name>.yaml` holds, and the file's place for messages; UserError lists
    the known ones."""
    try:
        path = root / "params" / folder / f"{named(name)}.yaml"
    except ValueError as error:
        raise UserError(str(error)) from None
    if not path.exists():
        known = sorted(other.stem for other in path.parent.glob("*.yaml"))
        raise UserError(f"unknown {what} {name!r}{hint(name, known)}")
    return load_yaml(path), str(path.relative_to(root))


def study_names(root: Path) -> list[str]:
    """Every study there is a file for."""
    return sorted(path.stem for path in (root / "params" / "studies").glob("*.yaml"))


@functools.cache
def labels(root: Path, name: str, profile: Name | None = None) -> dict[str, str]:
    """Names for people of a study's variants, in its order, as it is written or under `profile`;
    none of an unknown study."""
    try:
        study = load_study(root, name, load_profile(root, profile) if profile else None)
        return {variant: spec.label for variant, spec in study.variants.items()}
    except UserError:
        return {}


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Those of `names` that one of `patterns` is, or means (`plain_*`, with *, ? and [...] as in a
    shell), in their order."""
    patterns = list(patterns)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def unmatched(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Those of `patterns` that mean none of `names`."""
    return [pattern for pattern in patterns if not matching(names, [pattern])]


def select_variants(study: Study, only: list[str], skip: list[str]) -> list[str]:
    """The variants to run, by name or pattern, in the study's order; what means none is an error
    that lists the known ones."""
    if unknown := unmatched(study.variants, [*only, *skip]):
        raise UserError(
            f"study {study.study} has no variant {unknown[0]!r}{hint(unknown[0], study.variants)}"
        )
    left_out = matching(study.variants, skip)
    chosen = [name for name in matching(study.variants, only or ["*"]) if name not in left_out]
    if not chosen:
        raise UserError(f"no variant of study {study.study} is left after --only and --skip")
    return chosen


def measured_pairs(
    study: Study, only: list[str], skip: list[str], parts: list[str]
) -> list[tuple[str, str]]:
    """(part, variant) of what is measured of the chosen variants, part by part, in the study's
    order.

    `parts`: these only; empty: all. Raises UserError for an unknown part or variant.
    """
    if unknown := [part for part in parts if part not in study.parts]:
        known = hint(unknown[0], study.parts)
        raise UserError(f"study {study.study} has no part {unknown[0]!r}{known}")
    variants = select_variants(study, only, skip)
    return [
        (part, variant)
        for part in parts or study.parts
        for variant in variants
        if variant in study.measured(part)
    ]


def resolve(
    study: Study,
    variant: str,
    part: str,
    repeat: int,
    overrides: dict[str, Any],
    root: Path | None = None,
) -> Strict:
    """The validated config of one run; with `root`, its relative paths made to mean there what they
    mean here."""
    spec = study.parts[part]
    cls = get_kind(spec.kind).config_class()
    # What the part sets can be overridden, too; everything else from the command line belongs to
    # the variant's config.
    for_part = {key: overrides[key] for key in overrides.keys() & spec.settings}
    for_config = {key: value for key, value in overrides.items() if key not in for_part}
    config = deep_merge(study.base, study.variants[variant].config)
    if {"preset", "scaling_factor"} & {*(for_config.get("model") or {})}:
        config = {**config, "model": {}}  # a whole shape: none of the study's keys stay
    config = deep_merge(config, for_config)
    # Searches and peers take other keys than a training run has.
    keys = getattr(cls, "from_study", deep_merge)
    merged = keys(config, deep_merge(spec.settings, for_part))
    seed = merged.get("seed", 0)
    if "seed" in cls.model_fields and isinstance(seed, int):
        merged["seed"] = seed + repeat
    merged = merged if root is None else resolved_paths(merged, root)
    return checked(cls, merged, f"study {study.study}, variant {variant}, part {part}")


def plan_study(
    study: Study,
    *,
    root: Path,
    runs_root: Path,
    fingerprint: str,
    dataset_id: Any,
    only: list[str] | None = None,
    skip: list[str] | None = None,
    parts: list[str] | None = None,
    overrides: dict[str, Any] | None = None,
) -> list[PlannedRun]:
    """Every run of `study`, in order. `dataset_id(DataConfig) -> str` prepares a dataset and names
    its content."""
    pairs = measured_pairs(study, only or [], skip or [], parts or [])
    # Resolve everything before anything is prepared: a wrong key of the last variant must not cost
    # the first an hour.
    resolved = [
        (variant, part, repeat, resolve(study, variant, part, repeat, overrides or {}, root))
        for part, variant in pairs
        for repeat in range(study.parts[part].repeats)
    ]
    # Repeat by repeat, every second one backwards: nothing is always measured before what it is
    # compared with.
    rounds = itertools.groupby(sorted(resolved, key=lambda run: run[2]), key=lambda run: run[2])
    resolved = [
        run for repeat, runs in rounds for run in (list(runs)[::-1] if repeat % 2 else runs)
    ]
    kinds = {study.parts[part].kind for part in parts or study.parts}
    codes = {kind: code_facts(get_kind(kind).code, root) for kind in kinds}
    plan = []
    for variant, part, repeat, config in resolved:
        spec, code = study.parts[part], codes[study.parts[part].kind]
        inputs = run_inputs(config, get_kind(spec.kind).uses_data, dataset_id)
        key = run_key(key_config(config), spec.kind, code["hash"], fingerprint, *inputs.values())
        run_id = RunId(study.study, variant, part, repeat, key)
        folder, label = runs_root / study.study / run_id.folder, study.variants[variant].label
        plan.append(
            PlannedRun(
                run_id, spec.kind, config, label, spec.timeout_s, folder, code, fingerprint, inputs
            )
        )
    return plan
