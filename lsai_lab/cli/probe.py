"""`lsai probe`: measure this machine, and write its passport."""

import datetime
import hashlib
import json
import shutil
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from lsai_core.base.errors import UserError
from lsai_lab.cli import options as opt
from lsai_lab.cli.tables import say
from lsai_lab.project.files import repo_root


class DeviceName(StrEnum):
    """What is measured."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


SecondsOption = Annotated[
    float | None,
    typer.Option(
        min=1,
        max=3600,
        help="Measure about so long, the most useful first; 480 on a GPU, 90 on a CPU.",
    ),
]
OutOption = Annotated[
    Path | None, typer.Option(help="Where the passport goes (default: .cache/passport.json).")
]
AgainOption = Annotated[
    bool, typer.Option("--again", help="Forget what an interrupted probe has measured.")
]
ShareOption = Annotated[
    bool,
    typer.Option(
        "--share", help="Measure nothing: show what a pull request would add. Nothing is sent."
    ),
]


def probe(
    seconds: SecondsOption = None,
    out: OutOption = None,
    device: Annotated[DeviceName, typer.Option(help="auto: the GPU, if any.")] = DeviceName.auto,
    again: AgainOption = False,
    share: ShareOption = False,
    as_json: opt.JsonOption = False,
) -> None:
    path = out or repo_root() / ".cache" / "passport.json"
    if share:
        opt.exclude({"--share": True, "--seconds": seconds, "--again": again}, "it only reads")
        from lsai_lab.predictions.passport_told import shared

        for line in shared(path):
            print(line)
        return
    if path.is_dir():
        raise UserError(f"--out {path} is a folder; name a file in it")
    _measure(path, seconds, device.value, again)
    if as_json:
        print(path.read_text(encoding="utf-8"), end="")
    else:
        _print(path)


def _measure(path: Path, seconds: float | None, device_name: str, again: bool) -> None:
    """Measure and write the passport; exit code 1 if nothing could be measured."""
    from lsai_core.training.step import resolve_device
    from lsai_lab.benches import probe as bench
    from lsai_lab.predictions.passports import passport_of, write_passport
    from lsai_lab.runs.disturbance import Quiet
    from lsai_lab.runs.writer import only_writer

    began, quiet, device = time.perf_counter(), Quiet(), resolve_device(device_name)
    facts = bench.device_facts(device)
    kept = path.with_name(f"{path.name}.parts")
    folder = kept / _key(facts)
    if again or not folder.exists():  # what was measured of another device or by other code
        shutil.rmtree(kept, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    every, found = bench.parts(device, facts["count"]), dict[str, Any]()
    limit = seconds or bench.USUAL_S[device.type]
    _tell(f"{facts['count']} x {facts['name']}; at most about {limit:.0f} s")
    with only_writer(folder, "the probe"):
        told = bench.run_parts(every, device, folder, limit, lambda p, s: _begins(p, s, began))
        for part, result in told:
            if result is None:
                _tell(f"left out, for there is no time for it: {part.about}")
            elif result.get("outcome", "ok") != "ok":
                _tell(f"could not be measured: {part.about} ({result['reason']})")
            else:
                found[part.name] = result
    if "ceilings" not in found:
        _tell("no passport: not even products and copies could be measured")
        raise typer.Exit(1)
    disturbed = quiet.results({}).get("disturbed")
    if disturbed:
        _tell(f"disturbed: {disturbed}; measure again when the machine is quiet")
    took, day = time.perf_counter() - began, datetime.date.today().isoformat()
    passport = passport_of(facts, found, day=day, seconds=took, disturbed=disturbed)
    write_passport(path, passport)
    shutil.rmtree(kept, ignore_errors=True)


def _key(facts: dict[str, Any]) -> str:
    """What measurements of one probe have in common: the device and the code."""
    from lsai_core.base.code import version_of

    text = json.dumps([facts, version_of("lsai_lab.benches.probe")])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _begins(part: Any, left_s: float, began: float) -> None:
    _tell(f"{time.perf_counter() - began:4.0f} s, about {left_s:.0f} s left: {part.about}")


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _print(path: Path) -> None:
    from lsai_core.profiling.passport import read_passport
    from lsai_lab.predictions.passport_told import lines

    passport = read_passport(path)
    for line in lines(passport):
        print(line)
    size = path.stat().st_size / 1e3
    say(f"\nThe passport: {path} ({size:.1f} kB, measured in {passport.seconds:.0f} s).")
    print(f"A prediction with it: lsai predict --model llama3.2-1b --passport {path}")
