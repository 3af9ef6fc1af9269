"""`make report`, whole: run the studies, execute the chapters, bind and render. What has not changed is not done again.

Runs are reused by their key. A chapter is executed again when its notebook, the records it reads, or the code and parameters
it depends on have changed; the report is rendered again when a chapter or a run's page has. Each of these says what it
reused.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from lsai_core.code import closure, code_hash
from lsai_core.errors import UserError, hint
from lsai_core.files import write_text
from lsai_core.profiling.limits import cpu_cores
from lsai_core.strict import Strict, validated
from lsai_lab.files import load_yaml
from lsai_lab.report.build import build_report
from lsai_lab.report.render import HTML, PDF, Engine
from lsai_lab.report.selection import select_runs
from lsai_lab.runs.driver import cores_shared_by
from lsai_lab.runs.notebook import execute_notebook
from lsai_lab.runs.records import Run
from lsai_lab.runs.session import Session
from lsai_lab.runs.stop import StopRequest
from lsai_lab.runs.study import PlannedRun, matching

CHAPTER_TIMEOUT_S = 900.0
CHAPTERS_AT_A_TIME = min(cpu_cores(), 4)  # each holds half a gigabyte


class Chapter(Strict):
    """One notebook of the report and the studies it speaks of (none: all)."""

    notebook: str
    studies: list[str] = []


class ReportConfig(Strict):
    """`params/report.yaml`."""

    title: str
    chapters: list[Chapter]

    @property
    def studies(self) -> list[str]:
        """Every study of the report, in the order in which the chapters first speak of them."""
        return list(dict.fromkeys(study for chapter in self.chapters for study in chapter.studies))


def load_report(root: Path) -> ReportConfig:
    """Read and validate `params/report.yaml`."""
    return validated(ReportConfig, load_yaml(root / "params" / "report.yaml"), "params/report.yaml")


def plan_report(
    session: Session, only: list[str], skip: list[str], run_options: dict[str, object]
) -> dict[str, list[PlannedRun]]:
    """The runs of every study of the report. `only` and `skip` name studies or variants, also by pattern; what means none is an error."""
    studies = {name: session.study(name) for name in load_report(session.root).studies}
    known = dict.fromkeys([*studies, *(variant for study in studies.values() for variant in study.variants)])
    if unknown := [pattern for pattern in (*only, *skip) if not matching(known, [pattern])]:
        raise UserError(f"--only/--skip: no study or variant {unknown[0]!r}{hint(unknown[0], known)}")
    plans: dict[str, list[PlannedRun]] = {}
    for name, study in studies.items():
        wanted = list(study.variants) if not only or matching([name], only) else matching(study.variants, only)
        left_out = list(study.variants) if matching([name], skip) else matching(study.variants, skip)
        if left := [variant for variant in wanted if variant not in left_out]:
            plans[name] = session.plan(name, only=left, **run_options)
    return plans


def make_report(
    session: Session,
    *,
    only: list[str],
    skip: list[str],
    out: Path,
    formats: list[str],
    engine: Engine = "auto",
    run_studies: bool = True,
    run_options: dict[str, object] | None = None,
) -> bool:
    """Bring the report up to date. Returns False if a run or a chapter did not end well (the report shows which).

    `run_studies=False` makes the report from the records there are, executing nothing but the chapters.
    """
    config = load_report(session.root)
    plans = plan_report(session, only, skip, run_options or {}) if run_studies else {}
    build = out.parent / "_build"
    with _disk_errors(out):
        for folder in (out, build):
            folder.mkdir(parents=True, exist_ok=True)  # a place that cannot be written is told before anything runs
    good = True
    own: dict[str, list[str]] = {}
    for name, plan in plans.items():
        print(f"study {name}: {len(plan)} runs with profile {session.profile.profile}", flush=True)
        summaries = session.run(plan, untimed_jobs=_searches_at_a_time(session))
        good &= all(summary.outcome in ("ok", "oom", "unavailable") for summary in summaries)
        own[name] = [f"{run.id.study}/{run.folder.name}" for run in plan]
    every = [folder for folders in own.values() for folder in folders]

    def execute(chapter: Chapter, stop: StopRequest) -> tuple[Path, str | None]:
        folders = every
        if chapter.studies and run_studies:
            folders = [folder for study in chapter.studies for folder in own.get(study, [])] or ["none"]
        return _execute_chapter(session, chapter, folders, build / "chapters", stop)

    with _disk_errors(out):
        executed = _side_by_side(execute, config.chapters)
        runs = select_runs(None, session.runs_root, session.root / "reports", every)
        _render(session, config, [target for target, _ in executed], runs, out, formats, engine, build)
    problems = [problem for _, problem in executed if problem]
    for problem in problems:
        print(f"report: a chapter did not complete: {problem}", flush=True)
    return good and not problems


def _searches_at_a_time(session: Session) -> int:
    """On a CPU each search has a memory limit of its own; a GPU's memory is the limit, so there one search has it all."""
    return 1 if session.env["gpu"] else min(cpu_cores(), 2)


def _side_by_side(
    execute: Callable[[Chapter, StopRequest], tuple[Path, str | None]], chapters: list[Chapter]
) -> list[tuple[Path, str | None]]:
    """`execute` of each chapter, in their order, so many at a time as there are cores: chapters measure nothing.

    An error or an interrupt ends those that are being executed and begins no other.
    """
    stop = StopRequest()
    with ThreadPoolExecutor(CHAPTERS_AT_A_TIME) as pool:  # each thread waits for a process
        futures = [pool.submit(execute, chapter, stop) for chapter in chapters]
        try:
            ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in ended:
                future.result()  # raises what one of them raised
            return [future.result() for future in futures]
        except BaseException:
            stop.deadline = 0.0
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextlib.contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    """A full or read-only disk is the user's to mend: one line that names the place."""
    try:
        yield
    except OSError as error:
        where = error.filename or out
        raise UserError(
            f"cannot write the report at {where}: {error.strerror or error}; mend that or choose another folder with --out"
        ) from error


def _execute_chapter(
    session: Session, chapter: Chapter, own_runs: list[str], folder: Path, stop: StopRequest
) -> tuple[Path, str | None]:
    source, target = session.root / "notebooks" / chapter.notebook, folder / chapter.notebook
    if not source.exists():
        raise UserError(f"params/report.yaml names the notebook {source}, which does not exist")
    every = select_runs(None, session.runs_root, session.root / "reports", own_runs)
    runs = [run for run in every if not chapter.studies or run.summary.id.study in chapter.studies]
    inputs = [source, *_record_files(runs), *sorted((session.root / "params").rglob("*.yaml"))]
    key = _digest(inputs, repr((own_runs, session.profile.profile)), code_hash(closure(["lsai_lab.report.make"])))
    stamp = target.with_suffix(".key")
    if target.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == key:
        print(f"chapter {chapter.notebook}: reused (nothing that it reads has changed)", flush=True)
        return target, None
    print(f"chapter {chapter.notebook}: executing", flush=True)
    stamp.unlink(missing_ok=True)
    parameters = {"own_runs": own_runs, "profile": session.profile.profile}
    problem = execute_notebook(
        source, target, parameters, root=session.root, timeout_s=CHAPTER_TIMEOUT_S, stop=stop,
        environment={**cores_shared_by(CHAPTERS_AT_A_TIME), "LSAI_PROFILE": session.profile.profile},
    )  # fmt: skip
    if problem is None:
        write_text(stamp, key)
        return target, None
    if not target.exists():
        raise UserError(f"chapter {chapter.notebook} could not be executed: {problem}")
    return target, f"{chapter.notebook}: {problem}"


def _render(
    session: Session, config: ReportConfig, chapters: list[Path], runs: list[Run], out: Path, formats: list[str],
    engine: Engine, build: Path,
) -> None:  # fmt: skip
    """Render unless the last rendering was made from exactly these inputs."""
    used = shutil.which("quarto") if engine == "auto" else engine
    style = sorted(path for path in (session.root / "reports").glob("*") if path.is_file())
    inputs = [*chapters, *_record_files(runs), *style]
    key = _digest(inputs, repr((formats, config.title, used)), code_hash(closure(["lsai_lab.report.build"])))
    stamp = build / "rendered.key"
    wanted = [out / {"html": HTML, "pdf": PDF}[name] for name in formats]
    if stamp.exists() and stamp.read_text(encoding="utf-8") == key and all(path.exists() for path in wanted):
        print(f"report: up to date, reused: {', '.join(map(str, wanted))}", flush=True)
        return
    stamp.unlink(missing_ok=True)
    started = time.monotonic()
    machine = session.env["gpu"] or f"{session.env['cpu']}, {session.env['cpu_cores']} cores"
    title = f"Made on: {machine}, profile {session.profile.profile}"
    build_report(chapters, runs, out, config.title, machine=title, formats=formats, engine=engine, build=build)
    print(f"report: bound and rendered in {time.monotonic() - started:.1f} s", flush=True)
    write_text(stamp, key)


def _record_files(runs: Iterable[Run]) -> list[Path]:
    names = ("summary.json", "config.json", "env.json", "notebook.ipynb")
    return [run.folder / name for run in runs for name in names if (run.folder / name).exists()]


def _digest(files: Iterable[Path], *facts: str) -> str:
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
    for path in files:
        digest.update(str(path.name).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
