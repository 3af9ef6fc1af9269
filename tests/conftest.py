"""What several test files share: a small text, a tiny model on it, a project folder of its own, and
a way to call `lsai`.

Expensive things are made once per session: the prepared dataset.

`make test` runs several workers (pytest-xdist), each of which would make these things again. So
tests are handed out by file, files that share an expensive fixture together, the longest first.
Workers share the cores, so each computes with one thread.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import nbformat
import numpy as np
import psutil
import pytest
import torch
import yaml
from nbformat.v4 import new_markdown_cell, new_notebook

from lsai_core.base.files import read_jsonl
from lsai_core.base.limits import cpu_cores
from lsai_core.config.strict import deep_merge, validated
from lsai_core.config.train import DataConfig, TrainConfig
from lsai_core.training.combinations import checked
from lsai_lab.benches.machine import measure_ceilings
from lsai_lab.cli import main
from lsai_lab.data import Dataset, prepare
from lsai_lab.machine.environment import environment
from lsai_lab.report.load import session
from lsai_lab.runs.find import tell_once
from lsai_lab.runs.notebook import RUN_LOG
from lsai_lab.runs.records import Run, RunId, Summary, find_runs, run_key
from lsai_lab.runs.shown_columns import TERMINAL

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # So it is in a shell's background job, and then for all that is started here, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

CHECKOUT = Path(__file__).resolve().parent.parent
# What `make test` was given is not for the `make` of a test, to which make would hand it on.
MAKE_OPTIONS = re.findall(r"(?m)^(\w+) *\?=", (CHECKOUT / "Makefile").read_text(encoding="utf-8"))
for name in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS", *MAKE_OPTIONS):
    os.environ.pop(name, None)
TINY_MODEL = {
    "n_layers": 2,
    "d_model": 32,
    "n_heads": 2,
    "n_kv_heads": 1,
    "d_ff": 64,
    "vocab_size": 320,
}


# Files that share a fixture which takes a minute (`hazards`), and the order of the groups, the
# longest first.
TOGETHER = {"test_cli.py": "test_runs.py", "test_study.py": "test_runs.py"}
LONG = (
    "test_slurm.py",
    "test_slurm_container.py",
    "test_runs.py",
    "test_notebooks.py",
    "test_face.py",
    "test_jupyterlab.py",
    "test_book.py",
    "test_checkpoint.py",
    "test_launch.py",
    "test_context.py",
    "test_fsdp.py",
    "test_scale.py",
    "test_fp8_report.py",
)
MOST_WORKERS = 8  # each holds a torch of its own, and the longest group takes as long as it takes


def group_of(test: str) -> str:
    """The tests that `test`, a node id, stays together with on one worker: a file's name."""
    name = test.split("::")[0].rsplit("/", 1)[-1]
    return TOGETHER.get(name, name)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: as many as the cores that this process may use; one where the tests would share a
    GPU's memory."""
    return 1 if torch.cuda.is_available() else min(cpu_cores(), MOST_WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, by `group_of`."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByGroup(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none; a worker's tests are in the order in
    which groups shall begin."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    if "PYTEST_XDIST_WORKER" in os.environ:
        rank = {name: number for number, name in enumerate(LONG)}
        items.sort(key=lambda item: rank.get(group_of(item.nodeid), len(rank)))


def write_corpus(path: Path, documents: int = 300, seed: int = 0) -> Path:
    """JSON lines of sentences from a small grammar, so that there is something to learn in them."""
    rng = np.random.default_rng(seed)
    subjects, verbs, objects = (
        ["a cat", "the dog", "my fish", "one bird"],
        ["sees", "likes", "eats"],
        ["milk", "corn", "sun"],
    )
    with path.open("w") as file:
        for number in range(documents):
            sentences = [
                f"{rng.choice(subjects)} {rng.choice(verbs)} {rng.choice(objects)}."
                for _ in range(12)
            ]
            file.write(json.dumps({"text": f"story {number}: " + " ".join(sentences)}) + "\n")
    return path


def tiny(**changes: Any) -> TrainConfig:
    """A run of a tiny model on a CPU that takes a few milliseconds per step; `changes` are laid
    over it."""
    base = {
        "model": TINY_MODEL,
        "device": "cpu",
        "data": {"vocab_size": 320},
        "seq_len": 32,
        "batch_size": 4,
        "steps": 12,
        "log_every": 1,
        "optim": {"lr": 3e-3, "warmup_steps": 3},
        "eval": {"sequences": 8},
        "profile": {"memory_steps": 0, "skip_steps": 2},
    }
    return checked(TrainConfig, deep_merge(base, changes), "test")


def losses(folder: Path) -> list[float]:
    """The loss column of a run's metrics file; fails if a step is missing or stands twice."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [row["loss"] for row in rows]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No own runs, in the checkout's laboratory, without a profile or a terminal, whose width would
    decide what is shown (a worker of pytest says 80 columns)."""
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    monkeypatch.setenv("LSAI_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("LSAI_PROFILE", raising=False)
    monkeypatch.setenv("COLUMNS", str(TERMINAL))
    session.cache_clear()
    tell_once.cache_clear()
    yield tmp_path / "runs"
    session.cache_clear()


def write_run(
    root: Path,
    study: str,
    variant: str,
    part: str = "train",
    repeat: int = 0,
    *,
    kind: str = "train",
    outcome: Any = "ok",
    reason: str | None = None,
    results: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    metrics: list[dict[str, Any]] | None = None,
) -> Path:
    """A finished run in the format of the records, as if it had been executed on this machine;
    returns its folder."""
    run = RunId(study, variant, part, repeat, run_key({}, study, variant, part, str(repeat)))
    folder = root / study / run.folder
    folder.mkdir(parents=True)
    started = f"2026-01-01T00:00:{repeat:02d}+00:00"
    Summary(
        run, kind, outcome, reason, started, 1.0, f"lsai study {study}", {}, results or {}
    ).write(folder)
    (folder / "config.json").write_text(json.dumps(config or {}))
    (folder / "env.json").write_text(json.dumps(environment()))
    if metrics:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return folder


def below_cell(error: Any) -> list[str]:
    """The lines that IPython shows of an error below the cell that raised it."""
    try:
        raise error
    except type(error):
        return list(error._render_traceback_())


def gpu_bytes() -> int:
    """What this process holds on the GPU once it has let go of all that it can: what earlier tests
    left behind, or nothing."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "stories.jsonl")


@pytest.fixture(scope="session")
def dataset(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    config = validated(DataConfig, {"source": f"file:{corpus}", "vocab_size": 320}, "test")
    return prepare(config, tmp_path_factory.mktemp("data"), progress=False)


@pytest.fixture
def titan_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan runs without a GPU, where it is installed (also in a folder of its own)."""
    from lsai_lab.peers import run as run_module
    from lsai_lab.peers.config import PeerConfig
    from lsai_lab.peers.run import adapter

    monkeypatch.setattr(PeerConfig, "needs_gpu", False)
    monkeypatch.setattr(
        run_module,
        "adapter",
        lambda config, version: adapter(config, version) and "titan_cpu",
    )
    given = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{CHECKOUT}:{CHECKOUT / 'tests'}:{given}")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The same number of threads here as in a child process with OMP_NUM_THREADS=1: sums in the
    same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Project:
    """A project folder with params/ and notebooks/ of its own, where `lsai` can be called, here or
    as a process."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def env(self) -> dict[str, str]:
        own = {
            "LSAI_ROOT": str(self.root),
            "LSAI_RUNS": str(self.runs),
            "LSAI_DATA": str(self.root / "data"),
        }
        # Tiny models gain nothing from threads, and on a busy machine they wait for each other.
        return {**own, "OMP_NUM_THREADS": "1", **self.environment}

    def lsai(self, *arguments: object) -> tuple[int, str, str]:
        """`lsai <arguments>` in this process: (exit code, standard output, standard error).
        Tracebacks are not caught."""
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            for key, value in self.env.items():
                patch.setenv(key, value)
            patch.setattr(sys, "argv", ["lsai", *map(str, arguments)])
            session.cache_clear()
            try:
                main()
                code = 0
            except SystemExit as exit_:
                code = int(exit_.code or 0)
        session.cache_clear()  # of this project; the next test reads its own
        return code, out.getvalue(), err.getvalue()

    def start(self, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        """`lsai <arguments>` as a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "lsai_lab.cli", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(CHECKOUT), **self.env},
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def write_yaml(self, path: str, value: dict[str, Any]) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(yaml.safe_dump(value, sort_keys=False))

    def found(self) -> dict[str, Run]:
        """The finished runs by name, for example `baseline` or `baseline.batch`."""
        return {run.summary.id.name: run for run in find_runs(self.runs)}


def make_project(
    root: Path,
    corpus: Path,
    ceilings: dict[str, Any],
    variants: dict[str, dict[str, Any]] | None = None,
    **base: Any,
) -> Project:
    """A project in the folder `root`, whose memory study trains the tiny model of `tiny()` on
    `corpus`, with the given variants; `ceilings` are this machine's."""
    shutil.copytree(CHECKOUT / "notebooks", root / "notebooks", ignore=shutil.ignore_patterns(".*"))
    shutil.copytree(CHECKOUT / "params", root / "params")
    for path in [
        *(root / "params" / "studies").glob("*"),
        *(root / "params" / "profiles").glob("*"),
    ]:
        path.unlink()
    front = new_notebook(cells=[new_markdown_cell("# Front {#sec-summary}")])
    nbformat.write(front, root / "notebooks" / "00-summary.ipynb")
    project = Project(root)
    config = tiny().model_dump(mode="json", include={*tiny().model_fields_set} - {"model"})
    config |= {"model": TINY_MODEL, "data": {"source": f"file:{corpus}", "vocab_size": 320}}
    search = {
        "kind": "batch_search",
        "timeout_s": 200,
        "settings": {"cpu_limit_gib": 0.1, "resolution": 0.5},
    }
    study = {
        "study": "memory",
        "title": "Memory",
        "question": "Which?",
        "baseline": "baseline",
        "parts": {"train": {"timeout_s": 200}, "batch": search},
        "base": deep_merge(config, base),
        "variants": {
            name: {"label": name, **v} for name, v in (variants or {"baseline": {}}).items()
        },
    }
    project.write_yaml("params/studies/memory.yaml", study)
    machine: dict[str, Any] = {"study": "machine", "title": "Machine", "question": "How fast?"}
    machine |= {
        "parts": {"ceilings": {"kind": "ceilings"}},
        "base": {"budget_s": 0.2, "device": "cpu"},
    }
    project.write_yaml(
        "params/studies/machine.yaml", {**machine, "variants": {"machine": {"label": "this"}}}
    )
    write_run(project.runs, "machine", "machine", "ceilings", kind="ceilings", results=ceilings)
    # the shipped claims speak of the shipped study
    (root / "params" / "claims.yaml").write_text("{}\n")
    (root / "reports").mkdir()
    for path in (
        path
        for path in (CHECKOUT / "reports").iterdir()
        if path.is_file() and path.suffix != ".ipynb"
    ):
        shutil.copy(path, root / "reports")
    report = yaml.safe_load((root / "reports" / "_quarto.yml").read_text())
    # no chapter tells records, which this project has none of
    report["book"]["chapters"] = ["index.ipynb", "65-yours.ipynb"]
    project.write_yaml("reports/_quarto.yml", report)
    project.write_yaml("params/profiles/cpu.yaml", {"profile": "cpu", "description": "test"})
    project.write_yaml(
        "params/profiles/gpu.yaml", {"profile": "gpu", "description": "test", "gpu": "*"}
    )
    return project


@pytest.fixture(scope="session")
def ceilings() -> dict[str, Any]:
    """Measured once, so that not every run of a tiny model measures this machine for two
    seconds."""
    return measure_ceilings(torch.device("cpu"), budget_s=0.2)


@pytest.fixture(scope="session")
def new_project(
    corpus: Path, ceilings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Project]:
    """Makes a project, see `make_project`."""

    def make(variants: dict[str, dict[str, Any]] | None = None, **base: Any) -> Project:
        root = tmp_path_factory.mktemp("project")
        return make_project(root, corpus, ceilings, variants, **base)

    return make


@pytest.fixture(scope="session")
def shared(new_project: Callable[..., Project]) -> Project:
    """A project for tests that execute nothing in it, or only what no other test does."""
    return new_project({"baseline": {}, "bf16": {"config": {"precision": "bf16_autocast"}}})


def process_of(folder: Path) -> psutil.Process | None:
    """The process of the run in `folder`, a descendant of this one that writes the run's log."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(file.path == str(folder.resolve() / RUN_LOG) for file in process.open_files()):
                return process
    return None


def starve(process: psutil.Process) -> None:
    """Leave a process 256 MiB more than it has."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    used = next(int(line.split()[1]) * 1024 for line in status.splitlines() if "VmData" in line)
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (used + (256 << 20),) * 2)


def strike(runs: Path, met: dict[str, int]) -> None:
    """Do to the variants of the memory study what their names say, each once, until all have met
    it; `met`: the processes of those that have, by variant."""
    signals = {"crash": signal.SIGSEGV, "endless": signal.SIGKILL}
    deadline = time.monotonic() + 200
    while len(met) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
        for folder in (runs / "memory").glob("*-*"):
            variant, metrics = folder.name.partition("-")[0], folder / "metrics.jsonl"
            if variant in met or variant not in ("oom", *signals):
                continue
            if variant != "oom" and (not metrics.exists() or len(read_jsonl(metrics)) < 3):
                continue
            if process := process_of(folder):
                met[variant] = process.pid
                if variant == "oom":
                    starve(process)
                else:
                    process.send_signal(signals[variant])


@dataclass
class Hazards:
    """A study in which much goes wrong: the project, what two `lsai study` said, the records after
    each, and the processes of runs that met something."""

    project: Project
    first: tuple[int, str, str]
    after_first: dict[str, Run]
    second: tuple[int, str, str]
    after_second: dict[str, Run]
    processes: list[int]


@pytest.fixture(scope="session")
def hazards(new_project: Callable[..., Project]) -> Hazards:
    """Runs that are out of memory, killed, crash and unavailable, then one that ends well; and all
    of it once more with a time limit, within which the run that was killed does not end (under a
    minute)."""
    huge = {"model": {"n_layers": 8, "d_model": 2048, "d_ff": 8192, "n_heads": 2, "n_kv_heads": 2}}
    project = new_project(
        {
            "oom": {"config": huge},
            "endless": {"config": {"steps": 10_000_000}},
            "crash": {"config": {"steps": 10_000_000}},
            "fa2": {"config": {"attention": {"backend": "fa2"}, "precision": "bf16"}},
            "baseline": {},
        }
    )
    short = {
        "profile": "short",
        "description": "impatient",
        "studies": {"memory": {"parts": {"train": {"timeout_s": 10}}}},
    }
    project.write_yaml("params/profiles/short.yaml", short)

    met: dict[str, int] = {}
    striker = threading.Thread(target=strike, args=(project.runs, met))
    striker.start()
    first = project.lsai("study", "memory", "--parts", "train", "--profile", "cpu")
    striker.join()
    after_first = project.found()
    second = project.lsai(
        "study", "memory", "--parts", "train", "--profile", "short", "--skip", "fa2"
    )
    return Hazards(project, first, after_first, second, project.found(), list(met.values()))
