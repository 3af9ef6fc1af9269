"""Mutated records: one is damaged at a time, and must be shown as that or as itself, while all
others go on.

A few committed runs of each kind, with the first rows of their metrics, stand for all. One of them
is copied to another machine and among the runs of one's own, a fault is put into it, and everything
that reads records reads them again.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
FOREIGN = "foreign"
FILES = (
    "summary.json",
    "env.json",
    "config.json",
    "run.json",
    "metrics.jsonl",
    "kernels.json",
    "notebook.ipynb",
)
LIMIT_S, WAIT_S = 60, 600  # of this process's work; of time, on a machine that others share
# What has no place where a number, a word or a list is: also what JSON allows and no record needs.
WRONG: list[Any] = [
    None,
    True,
    -1,
    0,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 100_000,
    "1e9",
    [],
    [1],
    {},
    {"a": 1},
    [[1]],
    [{"a": {"b": 1}}],
    "../../etc/passwd",
    "<script>",
    "---\r",
    "\x00\x1b[2J",
    "\u202e",
    "=1+1",
]
IDENTITY = {
    "machine": "h200",
    "own": True,
    "study": "speed",
    "variant": "other",
    "label": "Best",
    "part": "train",
    "repeat": 7,
    "outcome": "ok",
    "reason": "none",
    "key": "0",
    "kind": "train",
    "started": "2030-01-01",
    "wall_s": 1.0,
    "run": "/",
    "gpu": "H200",
    "main": True,
    "differs": "no",
    "path": "/",
}


class World:
    """A project with a few runs, and what reads them."""

    def __init__(self, folder: Path, kinds: tuple[str, ...] = ()) -> None:
        """`kinds`: of which kinds there are runs; of all where none is named."""
        self.root, self.runs = folder / "project", folder / "runs"
        for name in ("params", "notebooks"):
            shutil.copytree(CHECKOUT / name, self.root / name)
        for path in (CHECKOUT / "reports").iterdir():
            if path.is_file():
                (self.root / "reports").mkdir(exist_ok=True)
                shutil.copy(path, self.root / "reports")
        self.runs.mkdir()
        os.environ |= {
            "LSAI_ROOT": str(self.root),
            "LSAI_RUNS": str(self.runs),
            "LSAI_DATA": str(folder / "data"),
        }
        self.recorded = self.root / "reports" / "recorded"
        for place in ("recorded/predictions", "predictions"):
            shutil.copytree(CHECKOUT / "reports" / place, self.root / "reports" / place)
        self.chosen = [self._copied(path) for path in _chosen(kinds)]
        self.claims = self._claims()
        self.before = self.look()

    def _copied(self, run: Path) -> Path:
        target = self.recorded / run.relative_to(CHECKOUT / "reports" / "recorded")
        shutil.copytree(run, target)
        if (path := target / "metrics.jsonl").exists():
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:40]))
        return target

    def _claims(self) -> dict[str, Any]:
        """The claims that these few runs answer; those of estimators and rivals speak of every
        machine's runs, so of a whole foreign one, too."""
        import lsai_lab as lab
        from lsai_lab.claims.evaluate import evaluate, load_claims

        declared = load_claims()
        found = evaluate(lab.load(), declared)
        answered = found.loc[found["value"].notna(), "name"]
        everybody = ("estimators", "rivals")
        return {name: declared[name] for name in answered if declared[name].kind not in everybody}

    def copies(self, run: Path) -> list[Path]:
        """The run as another machine's, and as one's own."""
        targets = [
            self.recorded / FOREIGN / run.parent.name / run.name,
            self.runs / run.parent.name / run.name,
        ]
        return [Path(shutil.copytree(run, target)) for target in targets]

    def clear(self) -> None:
        """Without the mutated run."""
        for folder in (
            self.recorded / FOREIGN,
            *self.runs.iterdir(),
            self.root / "reports" / "kept",
        ):
            _remove(folder)

    def look(self) -> dict[str, Any]:
        """All that is shown of the records, by what it is about."""
        import lsai_lab as lab
        from lsai_lab.benches.attention_table import recorded_rankings
        from lsai_lab.claims.evaluate import evaluate
        from lsai_lab.cli.runs import show
        from lsai_lab.predictions.recorded import estimator_errors, predicted_runs
        from lsai_lab.predictions.rivals import rival_errors
        from lsai_lab.report import load
        from lsai_lab.report.runpages import write_run_pages
        from lsai_lab.runs.keep import record_runs
        from lsai_lab.runs.records import find_runs, recorded_runs

        load._committed.cache_clear()
        estimator_errors.cache_clear()
        rival_errors.cache_clear()
        _remove(self.root / "reports" / "kept")
        reports, seen = self.root / "reports", dict[str, Any]()
        frame = lab.load()
        others = frame[frame["machine"] != FOREIGN]
        seen["runs"] = {
            row["run"]: _json({k: v for k, v in row.items() if not _is_nothing(v)})
            for row in others.to_dict("records")
        }
        seen["foreign"] = [
            *frame.loc[frame["machine"] == FOREIGN, ["outcome", "reason", "gpu"]].to_dict("records")
        ]
        for row in frame.to_dict("records"):
            tables = [
                lab.steps(row),
                lab.kernels(row),
                lab.points(frame[frame["run"] == row["run"]]),
            ]
            if row["machine"] != FOREIGN:
                seen[f"steps, kernels and points of {row['run']}"] = [
                    table.to_csv() for table in tables
                ]
        seen["claims"] = _json(evaluate(frame, self.claims).to_dict("records"))
        every = recorded_runs(reports)
        predictions = predicted_runs(every, reports)
        seen["predictions"] = predictions[predictions["machine"] != FOREIGN].to_csv(index=False)
        seen["rankings"] = [
            str(each)
            for each in recorded_rankings([run for run in every if run.machine != FOREIGN])
        ]
        recorded_rankings(every)
        own = find_runs(self.runs)
        write_run_pages([*own, *every], reports)
        for path in sorted((reports / "runs").rglob("*.html")):
            if (
                FOREIGN not in path.parts
                and path.name != "index.html"
                and len(path.relative_to(reports).parts) == 4
            ):
                seen[f"page {path.relative_to(reports)}"] = path.read_text()
        seen["index"] = (reports / "runs" / "index.html").read_text()
        with contextlib.redirect_stdout(printed := io.StringIO()):
            show([*own, *every])
            show([*own, *every], as_json=True)
        seen["printed"] = printed.getvalue()
        others_only = [run for run in every if run.machine != FOREIGN]
        seen["kept"] = [
            path.parts[-2:] for path in record_runs(others_only, reports / "kept", "box")[0]
        ]
        record_runs(own, reports / "kept", "box2")
        return seen


def _chosen(kinds: tuple[str, ...]) -> list[Path]:
    """Of each kind the smallest good run of one machine, and a training run with its kernels."""
    found: dict[Any, tuple[int, Path]] = {}
    for path in sorted((CHECKOUT / "reports" / "recorded").glob("h200/*/*/summary.json")):
        facts = json.loads(path.read_bytes())
        size = sum(file.stat().st_size for file in path.parent.iterdir())
        what = (facts["kind"], (path.parent / "kernels.json").exists())
        if facts["outcome"] == "ok" and facts["kind"] in (kinds or (facts["kind"],)):
            found[what] = min(found.get(what, (size, path.parent)), (size, path.parent))
    return [path for _, path in found.values()]


def _json(value: Any) -> str:
    """As text, in which 5 is 5.0: a column of whole numbers becomes one of floats where a row has
    none."""

    def same(item: Any) -> Any:
        if isinstance(item, dict):
            return {str(key): same(inner) for key, inner in item.items()}
        if isinstance(item, list):
            return [same(inner) for inner in item]
        return float(item) if isinstance(item, int) else item

    return json.dumps(same(value), default=str, sort_keys=True)


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ------------------------------------------------------------------ faults in a folder: each says
# whether it must be seen

Fault = Callable[[random.Random, Path], bool]


def _existing(chance: random.Random, folder: Path) -> Path:
    return folder / chance.choice([name for name in FILES if (folder / name).exists()])


def _leaves(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*way, key))
    else:
        yield way


def _changed(chance: random.Random, path: Path, change: Callable[[Any, Any], None]) -> None:
    """Change one place in a JSON file, or in a line of a JSONL file."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    at = chance.randrange(len(lines))
    value = json.loads(lines[at])
    way = chance.choice([way for way in _leaves(value) if way])
    inner = value
    for key in way[:-1]:
        inner = inner[key]
    change(inner, way[-1])
    lines[at] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")


def wrong_value(chance: random.Random, folder: Path) -> bool:
    wrong = chance.choice(WRONG)
    _changed(chance, _existing(chance, folder), lambda inner, key: inner.__setitem__(key, wrong))
    return False


def missing_value(chance: random.Random, folder: Path) -> bool:
    _changed(chance, _existing(chance, folder), lambda inner, key: inner.__delitem__(key))
    return False


def identity_as_result(chance: random.Random, folder: Path) -> bool:
    value = json.loads((folder / "summary.json").read_bytes())
    for name in chance.sample([*IDENTITY], chance.randint(1, 4)):
        value["results"][name] = chance.choice([IDENTITY[name], [1], None, {"a": 1}])
    (folder / "summary.json").write_text(json.dumps(value))
    return True


def identity_of_another(chance: random.Random, folder: Path) -> bool:
    value = json.loads((folder / "summary.json").read_bytes())
    key, wrong = chance.choice(
        [("study", "fsdp"), ("variant", "x"), ("repeat", 9), ("part", "y"), ("key", "0" * 12)]
    )
    value["id"][key] = wrong
    (folder / "summary.json").write_text(json.dumps(value))
    return True


def wrong_result(chance: random.Random, folder: Path) -> bool:
    value = json.loads((folder / "summary.json").read_bytes())
    name = chance.choice(
        [name for name, found in value["results"].items() if isinstance(found, float)] or ["loss"]
    )
    value["results"][name] = chance.choice(
        ["fast", [1.0], {"a": 1}, -1.0, float("nan"), 1e300, None, True]
    )
    (folder / "summary.json").write_text(json.dumps(value))
    return value["results"][name] is not None  # null: not measured


def odd_name(chance: random.Random, folder: Path) -> bool:
    name = chance.choice(
        [
            "<script>",
            "a b\n",
            "x" * 5000,
            "",
            "---",
            "a.b",
            "__class__",
            "é" * 20,
            "'\"",
            "|",
            "main",
        ]
    )
    path = folder / chance.choice(["summary.json", "config.json", "env.json"])
    value = json.loads(path.read_bytes())
    (value["results"] if path.name == "summary.json" else value)[name] = chance.choice(WRONG)
    path.write_text(json.dumps(value))
    return False


def cut(chance: random.Random, folder: Path) -> bool:
    path = _existing(chance, folder)
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data) - 2)])
    return path.suffix == ".json"


def flipped(chance: random.Random, folder: Path) -> bool:
    path = _existing(chance, folder)
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 3, 30])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return False


def binary(chance: random.Random, folder: Path) -> bool:
    path = _existing(chance, folder)
    path.write_bytes(chance.randbytes(chance.choice([0, 1, 100, 5000])) + b"\xff\x00\n")
    return path.suffix != ".ipynb"


def other_json(chance: random.Random, folder: Path) -> bool:
    path = _existing(chance, folder)
    path.write_text(chance.choice(["[]", "null", "3", '"x"', "[{}]", "NaN", "{}", "true"]) + "\n")
    return path.name in ("summary.json", "kernels.json")


def deep(chance: random.Random, folder: Path) -> bool:
    path, levels = _existing(chance, folder), chance.choice([300, 5_000, 100_000])
    path.write_text(chance.choice(['{"a":', "[", '{"results":[']) * levels)
    return path.suffix != ".ipynb"


def deep_and_whole(chance: random.Random, folder: Path) -> bool:
    path, levels = _existing(chance, folder), chance.choice([150, 2_000])
    path.write_text('{"step": 0, "a": ' + "[" * levels + "]" * levels + "}\n")
    return path.name == "summary.json"


def folder_for_file(chance: random.Random, folder: Path) -> bool:
    path = _existing(chance, folder)
    path.unlink()
    path.mkdir()
    return path.suffix != ".ipynb"


def special_file(chance: random.Random, folder: Path) -> bool:
    path = _existing(chance, folder)
    path.unlink()
    if (kind := chance.choice(["pipe", "zeros", "loop", "nothing", "secret"])) == "pipe":
        os.mkfifo(path)
    else:
        target = {
            "zeros": "/dev/zero",
            "loop": path.name,
            "nothing": "nothing",
            "secret": "/etc/passwd",
        }[kind]
        path.symlink_to(target)
    return False


def endless(chance: random.Random, folder: Path) -> bool:
    path = _existing(chance, folder)
    with path.open("ab") as file:
        file.truncate(2**32)  # a hole on the disk
    return path.suffix != ".ipynb"


def encoding(chance: random.Random, folder: Path) -> bool:
    path = _existing(chance, folder)
    text = path.read_text()
    path.write_bytes(
        chance.choice(
            [
                text.encode("utf-16"),
                b"\xef\xbb\xbf" + text.encode(),
                text.replace("\n", "\r\n").encode(),
            ]
        )
    )
    return False


def renamed(chance: random.Random, folder: Path) -> bool:
    name = chance.choice(
        [
            "a b",
            "<b>x-1",
            "x\ny",
            "-x",
            "ż" * 20,
            "x" * 250,
            "$(x)",
            "a'b",
            "(x)",
            "&amp;",
            ".x",
            b"\xff\xfe",
        ]
    )
    other = (
        os.fsencode(folder.parent)
        + b"/"
        + (name if isinstance(name, bytes) else name.encode()[:250])
    )
    os.rename(os.fsencode(folder), other)
    return True


FAULTS: list[Fault] = [
    wrong_value,
    wrong_value,
    wrong_value,
    missing_value,
    identity_as_result,
    identity_of_another,
    wrong_result,
    odd_name,
    cut,
    flipped,
    binary,
    other_json,
    deep,
    deep_and_whole,
    folder_for_file,
    special_file,
    endless,
    encoding,
    renamed,
]


def survived(world: World, fault: Fault, seed: str) -> tuple[str, str | None]:
    """Put `fault` into a run, read everything, and say what is wrong: an error, another run
    changed, or the fault not shown."""
    run = random.Random(seed).choice(world.chosen)
    name = f"{fault.__name__} ({seed}) in {'/'.join(run.parts[-3:])}"
    try:
        for folder in world.copies(run):
            must_be_seen = fault(random.Random(seed), folder)
        with _limit():
            seen = world.look()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return (
            name,
            f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: "
            f"{str(error)[:200]}",
        )
    finally:
        world.clear()
    for what, before in world.before.items():
        if what not in ("foreign", "index", "printed") and seen.get(what) != before:
            return name, f"{what} changed: {_difference(before, seen.get(what))}"
    return name, _shown(seen, must_be_seen)


def _difference(before: Any, after: Any) -> str:
    """Where two texts, or two mappings of texts, part."""
    if isinstance(before, dict) and isinstance(after, dict):
        key = next(key for key in before | after if before.get(key) != after.get(key))
        return f"{key}: {_difference(before.get(key), after.get(key))}"
    one, other = str(before), str(after)
    pairs = enumerate(zip(one, other, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
    return f"{one[max(0, at - 60) : at + 60]!r} is {other[max(0, at - 60) : at + 60]!r}"


def _shown(seen: dict[str, Any], must_be_seen: bool) -> str | None:
    rows = seen["foreign"]
    if not rows:  # without a summary a run has not ended
        return "it is not shown" if must_be_seen else None
    outcome, reason = rows[0]["outcome"], str(rows[0]["reason"])
    if must_be_seen and outcome != "damaged":
        return f"it is shown as {outcome}"
    if outcome == "damaged" and (len(reason) < 10 or not reason.isprintable()):
        return f"its reason is not one line: {reason!r}"
    if "damaged" not in seen["index"] and outcome == "damaged":
        return "the list of runs does not show it"
    return None


@contextlib.contextmanager
def _limit() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"not read within {LIMIT_S} s of work, or {WAIT_S} s in all")

    kinds = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    before = {number: signal.signal(number, late) for number in kinds}
    try:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        signal.setitimer(signal.ITIMER_REAL, WAIT_S)
        yield
    finally:
        for number, kind in kinds.items():
            signal.setitimer(kind, 0)
            signal.signal(number, before[number])


def attempts(chance: random.Random, number: int, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Each fault in turn, in runs and places by chance."""
    world = World(folder)
    for at in range(number):
        yield survived(world, FAULTS[at % len(FAULTS)], f"{chance.randrange(10**9)}")
