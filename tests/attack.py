"""Faults by the hundred: `make attack`, or `python tests/attack.py --only "record mutations" --seed
7`.

Each class of faults is a function `attempts(random, number, folder)` of a module, which yields for
each of `number` attempts its name and what went wrong, or None if it was survived. What is tried
follows from the seed alone. A class is one line of `CLASSES`.
"""

import argparse
import importlib
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Attempts = Callable[[random.Random, int, Path], Iterator[tuple[str, str | None]]]


@dataclass(frozen=True)
class Class:
    """`function` ("module:name") makes attempts; `number` of them are made, and `bar` is the share
    that must be survived."""

    function: str
    number: int
    bar: float = 1.0

    @property
    def attempts(self) -> Attempts:
        module, _, name = self.function.partition(":")
        found: Attempts = getattr(importlib.import_module(module), name)
        return found


CLASSES = {
    "trainer files": Class("attack_files:titan_files", 60),
    "model configs": Class("attack_files:hf_configs", 60),
    "record mutations": Class("attack_records:attempts", 500, 0.995),
    "report injections": Class("attack_report:attempts", 120),
    "kills": Class("attack_kills:attempts", 100),
}


def tried(name: str, number: int, seed: int) -> list[tuple[str, str | None]]:
    """What became of each attempt of a class, in a folder of its own; faults are printed as they
    come, progress goes to stderr."""
    found, begun = list[tuple[str, str | None]](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        for attempt in CLASSES[name].attempts(
            random.Random(f"{seed} {name}"), number, Path(folder)
        ):
            found.append(attempt)
            if attempt[1] is not None:
                print(f"\n{name}: {attempt[0]}: {attempt[1]}", flush=True)
            bad = sum(fault is not None for _, fault in found)
            line = (
                f"{name}: {len(found)} of {number}, {bad} not survived, "
                f"{time.monotonic() - begun:.0f} s"
            )
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def main() -> int:
    """Every class, or one: each fault, a table, and 1 if a class is below its bar."""
    parser = argparse.ArgumentParser(
        description="Faults by the hundred, and how many are survived."
    )
    parser.add_argument("--only", choices=CLASSES, help="one class")
    parser.add_argument(
        "--number", type=int, help="attempts of each class, instead of its own number"
    )
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.only is None:  # each in a process of its own, for a project is found once
        command = [sys.executable, __file__, *sys.argv[1:], "--only"]
        ends = [subprocess.run([*command, name], check=False).returncode for name in CLASSES]
        return 1 if any(ends) else 0
    name, kind = given.only, CLASSES[given.only]
    found = tried(name, given.number or kind.number, given.seed)
    survived = sum(fault is None for _, fault in found)
    held = bool(found) and survived >= math.ceil(kind.bar * len(found))
    print(
        f"{name}, seed {given.seed}: {survived} of {len(found)} survived "
        f"({survived / max(1, len(found)):.1%}, bar {kind.bar:.1%}): "
        f"{'held' if held else 'below the bar'}"
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
