"""The records of the study on distributed attention, machine by machine, as tables that the chapter's parts share."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lsai_core.files import read_jsonl
from lsai_lab.benches.context.config import ALONE, NAMES
from lsai_lab.report.selection import select_runs
from lsai_lab.report.variants import OfMachine, by_machine, heads_label
from lsai_lab.runs.records import Run
from lsai_lab.runs.session import Session

STUDY = "context"
# What a machine's rows may lack: a CPU counts no memory and traces no communication.
_COLUMNS = (
    "reason", "kernel", "plan_imbalance", "repeats", "forward_ms", "training_ms", "forward_tflops", "training_tflops", "rank_training_ms",
    "sent_forward_mib", "sent_training_mib", "memory_gib", "rank_memory_gib", "step_ms", "rank_compute_ms", "busy_balance",
    "exposed_share", "sent_gb_per_s", "timeline", "out", "dq", "dk", "dv", "bound_out", "bound_dq", "bound_dk", "bound_dv",
)  # fmt: skip


@dataclass(frozen=True)
class Group(OfMachine):
    """The points of one shape of heads over one number of processes on a machine."""

    machine: str
    heads: str
    processes: int
    points: pd.DataFrame

    @property
    def label(self) -> str:
        return (
            f"{'mha' if 'kv' not in self.heads else 'gqa'}{self.heads.rsplit(' ', 1)[1]}-{self.processes}-{self.slug}"
        )

    def of(self, measure: str) -> pd.DataFrame:
        """The good points of one measure."""
        return self.points[(self.points["measure"] == measure) & (self.points["outcome"] == "ok")]

    @functools.cached_property
    def timed(self) -> pd.DataFrame:
        """The methods' timed points with their `efficiency`; missing where nothing was timed alone."""
        rows = self.of("time")
        rows = rows[~rows["method"].isin(ALONE)]
        return rows.assign(efficiency=rows["training_tflops"] / [self.alone_rate(kernel) for kernel in rows["kernel"]])

    @functools.cached_property
    def alone(self) -> pd.DataFrame:
        """What single processes reached on the whole sequence, each length and kernel once, ascending by length."""
        rows = self.of("time")
        rows = rows[rows["method"].isin(ALONE)].sort_values("length", kind="stable")
        return rows.drop_duplicates(["length", "kernel"])

    def alone_rate(self, kernel: str | None = None) -> float:
        """The best rate of a single process with this kernel at any length, in this group's own run if it was measured there; of all
        kernels, where this one was not timed alone."""
        rows = self.alone
        same = rows[rows["kernel"] == kernel]
        same = same if len(same) else rows
        own = same[same["processes"] == self.processes]
        found = (own if len(own) else same)["training_tflops"]
        return float(found.max()) if len(found) else float("nan")

    def at(self, length: int) -> pd.DataFrame:
        """The methods' points at one length by method, fastest first."""
        rows = self.timed
        return rows[rows["length"] == length].sort_values("training_ms").set_index("method")

    @property
    def lengths(self) -> list[int]:
        return sorted(int(n) for n in self.timed["length"].unique())

    @property
    def compared_length(self) -> int | None:
        """The longest length that most methods were timed at, a traced one if there is any; None if there is no length."""
        traced = self.timed[self.timed["length"].isin(self.of("trace")["length"])]
        counts = (traced if len(traced) else self.timed).groupby("length")["method"].nunique()
        return int(counts[counts == counts.max()].index.max()) if len(counts) else None

    @property
    def key(self) -> str:
        return str(self.points["key"].iloc[0])


@dataclass(frozen=True)
class Shared(OfMachine):
    """The study on one machine."""

    machine: str
    runs: list[Run]

    @property
    def on_gpu(self) -> bool:
        return any(run.config["device"] != "cpu" and run.env.get("gpu") for run in self.runs)

    @property
    def rate(self) -> tuple[str, float]:
        """The unit of this machine's speeds, and how many of it are one TFLOP/s."""
        return ("TFLOP/s", 1.0) if self.on_gpu else ("GFLOP/s", 1e3)

    @property
    def device(self) -> str:
        env = self.runs[0].env
        return str(env["gpu"]) if self.on_gpu else f"{env.get('cpu')}, {env.get('cpu_cores')} cores"

    @functools.cached_property
    def points(self) -> pd.DataFrame:
        """One row per point of every run, with the run's heads, processes and key."""
        found: list[dict[str, Any]] = []
        for run in self.runs:
            path = run.folder / "metrics.jsonl"
            config = run.config
            heads = heads_label(config["heads"], config["kv_heads"], config["head_dim"])
            facts = {"heads": heads, "processes": config["processes"], "key": run.summary.id.key}
            found += [{**row, **facts} for row in read_jsonl(path)] if path.exists() else []
        frame = pd.DataFrame(found)
        return frame.reindex(columns=[*frame.columns, *(c for c in _COLUMNS if c not in frame)]) if found else frame

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The shapes of heads in the study's order, each over ascending numbers of processes. What a GPU reached alone in another run
        with the same heads counts where this one did not measure it; processes on a CPU share it, so there only their own does."""
        found = []
        for heads in dict.fromkeys(self.points["heads"]) if len(self.points) else []:
            same = self.points[self.points["heads"] == heads]
            alone = same[same["method"].isin(ALONE)]
            for processes in sorted(same["processes"].unique()):
                mine = same[same["processes"] == processes]
                if self.on_gpu:
                    mine = pd.concat([mine, alone[alone["processes"] != processes]])
                found.append(Group(self.machine, heads, int(processes), mine))
        return found

    @property
    def shared(self) -> list[Group]:
        """Those of more than one process that have at least one good point."""
        return [group for group in self.groups if group.processes > 1 and len(group.timed)]


def load_shared(own_runs: list[str], profile: str | None) -> list[Shared]:
    """The reader's own machine first, then the committed ones."""
    session = Session(profile)
    runs = [
        run
        for run in select_runs(STUDY, session.runs_root, session.root / "reports", own_runs)
        if run.summary.kind == STUDY
    ]
    order = {name: index for index, name in enumerate(("mha128", "gqa128", "gqa64"))}
    runs.sort(key=lambda run: order.get(run.summary.id.variant.partition("_")[0], len(order)))
    machines = by_machine(runs)
    return [Shared(machine, some) for machine, some in machines.items()]


def present(rows: pd.DataFrame) -> list[str]:
    """The methods of some rows in the order in which every table and figure names them."""
    return [name for name in NAMES if name in set(rows["method"])]
