"""YAML as people mean it, settings from a command line, and where the project lies."""

import copy
import functools
import glob
import hashlib
import math
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator

from lsai_core.base.errors import UserError
from lsai_core.base.plugins import laboratory
from lsai_core.config.strict import deep_merge, flatten, nested

# The environment variable that a notebook has which is executed as a page, with nobody before it:
# the folder from which its links are seen.
PAGE_FOLDER = "LSAI_PAGE_FOLDER"
MOST_TOLD = 5  # words in a line
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # categories of Unicode
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


def content_hash(path: Path) -> Any:
    """BLAKE2b (16 bytes) of a file, a `hashlib` object."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))


def matching_paths(pattern: str, root: Path | None = None) -> list[str]:
    """The paths that `pattern`, a path or else a glob, means in the folder `root` (the current
    one), in no order.

    A path that exists is that path, whatever brackets or stars it holds.
    """
    if os.path.exists(os.path.join(root or "", pattern)):
        return [pattern]
    return glob.glob(pattern, root_dir=root, recursive=True)


@functools.lru_cache(maxsize=16384)
def one_line(text: str, longest: int = 2_000) -> str:
    """`text` in one line that can be shown anywhere: white space is one space, a character that
    cannot be seen (a control, a change of direction, half of a pair) is U+FFFD, and what is beyond
    `longest` characters is left out."""
    cut = text[:longest] + "…" * (len(text) > longest)
    words = " ".join("\n".join(cut.splitlines()).split())
    return "".join(
        "\ufffd" if unicodedata.category(letter) in _UNSEEN else letter for letter in words
    )


def shown_path(path: Path) -> str:
    """`path` as a table holds it, in UTF-8: bytes of a name that are none are U+FFFD."""
    return os.fsencode(path).decode(errors="replace")


def named(text: str) -> str:
    """`text`, if it can be the name of a study, profile, variant, part or machine: it becomes a
    file's name and stands in commands.

    Raises ValueError, which pydantic turns into an error at the name's place.
    """
    if not _NAME.fullmatch(text):
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise ValueError(
            f"{shown!r} is no name: up to 80 letters, digits, '.', '_' and '-', a letter or digit "
            f"first"
        )
    return text


Name = Annotated[str, AfterValidator(named)]


class _Loader(yaml.SafeLoader):
    """Numbers of YAML 1.2 (`_NUMBERS`), finite and of at most 64 bits; dates are text; no silently
    repeated keys."""

    aliases = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        # each may stand for many of the ones before it
        self.aliases += self.check_event(yaml.AliasEvent)
        if self.aliases > 50:
            raise yaml.composer.ComposerError(None, None, "more than 50 aliases")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """A number that JSON, torch and C can hold."""
        kind = node.tag.rpartition(":")[2]
        pattern = _NUMBERS["int"] if kind == "int" else "|".join(_NUMBERS.values())
        try:
            if not re.fullmatch(pattern, node.value, re.ASCII):
                raise ValueError  # of another kind than its tag says
            value = (
                int(node.value.replace("_", ""), 0)
                if kind == "int"
                else self.construct_yaml_float(node)
            )
            if abs(value) < (2**63 if kind == "int" else math.inf):
                return value
        except ValueError:
            pass
        what = f"{node.value[:30]!r} is no finite number of 64 bits"
        raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)


# Numbers as YAML 1.2 has them, which is as people write them. In YAML 1.1 1:30 is 90 (base 60) and
# 010 is 8; here they are text.
_NUMBERS = {
    "int": r"[-+]?(0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][\d_]*)",
    "float": r"[-+]?((\d[\d_]*\.[\d_]*|\.[\d_]+|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?|\.inf)|\.nan",
}
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in found
        if not tag.endswith((":timestamp", ":int", ":float"))
    ]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"^({_pattern})$", re.ASCII), list("-+0123456789.")
    )
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


def _parse(text: str, what: str) -> Any:
    """The YAML value of `text`; UserError in one line that begins with `what`, whatever is wrong
    with it."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise UserError(f"{what}: nested too deeply") from None
    # the last ones by wrong tags
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"{what}: {' '.join(str(error).split())[:500]}") from None


_parse_once = functools.lru_cache(maxsize=256)(_parse)  # a study is asked for again and again


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; a missing or malformed file is a `UserError` that names the file and the
    line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as YAML: {error}") from None
    value = copy.deepcopy(_parse_once(text, f"{path}: cannot be read as YAML"))
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a mapping of keys to values at the top level")
    return value


def parse_value(text: str) -> Any:
    """One YAML scalar or flow value, as given on a command line (`--set optim.lr=3e-4`); UserError
    if it is none."""
    return _parse(text, f"{text[:100]!r} cannot be read as a YAML value")


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """`["optim.lr=3e-4", "steps=10"]` as a nested mapping; UserError for anything that is not
    key=value."""
    overrides: dict[str, Any] = {}
    seen: dict[str, str] = {}
    for pair in pairs:
        path, separator, text = pair.partition("=")
        if not separator or not all(path.split(".")) or len(path) > 200:  # no key is as long
            raise UserError(
                f"--set wants key=value (for example optim.lr=3e-4), got {pair[:100]!r}"
            )
        if seen.setdefault(path, text) != text:
            raise UserError(
                f"--set gives {path[:100]} twice, as {seen[path][:100]} and as {text[:100]}; leave "
                f"one of them out"
            )
        overrides = deep_merge(overrides, nested(path, parse_value(text)))
    return overrides


def merged(settings: dict[str, Any], shorthands: dict[str, Any]) -> dict[str, Any]:
    """`--set` and what options stand for. UserError if both say something about one key, and not
    the same."""
    given, meant = flatten(settings), flatten(shorthands)
    for key in given.keys() & meant.keys():
        if given[key] != meant[key]:
            raise UserError(
                f"--set {key}={given[key]} and an option that sets it to {meant[key]}; leave one "
                f"of them out"
            )
    return deep_merge(settings, shorthands)


def folder_from_environment(name: str, default: Path) -> Path:
    """The folder that the environment variable `name` gives, else `default`; UserError if there can
    be no such folder."""
    if not (given := os.environ.get(name)):
        return default
    path = Path(os.path.abspath(given))
    above = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not above.is_dir():
        raise UserError(f"{name}={given[:200]}: {above} is no folder; set it to another")
    if any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise UserError(f"{name}={given[:200]}: a folder's name has at most 255 bytes")
    return Path(given)


def repo_root() -> Path:
    """The folder that holds `params/` and `notebooks/`: $LSAI_ROOT, else the nearest one above the
    current folder, else the source checkout."""
    if given := os.environ.get("LSAI_ROOT"):
        if not (Path(given) / "params").is_dir():
            raise UserError(
                f"LSAI_ROOT={given} holds no params/ folder; set it to the project's folder"
            )
        return Path(given)
    here, checkout = Path.cwd(), Path(__file__).resolve().parents[2]
    if (found := laboratory()) is not None:
        return found
    if (checkout / "params").is_dir() and (checkout / "notebooks").is_dir():
        return checkout
    make = "`lsai new lab DIR` makes a folder that has them"
    raise UserError(
        f"no params/ and notebooks/ at or above {here}; {make}; change into it or set LSAI_ROOT"
    )


def reading_root() -> Path:
    """`repo_root` or, outside of any laboratory, what an installed package brings of its own: to be
    read, never written."""
    packaged = Path(__file__).resolve().parents[1] / "template"
    try:
        return repo_root()
    except UserError:
        if os.environ.get("LSAI_ROOT") or not packaged.is_dir():
            raise
        return packaged


def some_of(words: Sequence[str], between: str = ", ") -> str:
    """Words in a line; of many the first ones, and how many there are more."""
    more = f" and {len(words) - MOST_TOLD} more" if len(words) > MOST_TOLD else ""
    return f"{between.join(words[:MOST_TOLD])}{more}"


def listed(given: str | Iterable[str]) -> list[str]:
    """Several names as a list; a single one is a list of one, not of its letters. UserError for
    what is neither."""
    if not isinstance(given, Iterable):
        raise UserError(f"a name, or a list of names, is wanted here, not {given!r}")
    return [given] if isinstance(given, str) else list(given)
