"""The records behind the chapter on sharding, machine by machine, as tables that its sections share."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from lsai_core.config import ModelConfig
from lsai_core.model import count_parameters
from lsai_lab.report.selection import select_runs
from lsai_lab.report.show import run_link
from lsai_lab.report.variants import OfMachine, by_machine, sittings, variant_rows
from lsai_lab.runs.records import Run
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import Profile, Study, load_study

STUDIES = ("ablation", "fsdp", "largest")
UNSTEADY = 0.2
METRICS = (
    "tokens_per_s", "tokens_per_s_per_gpu", "step_ms", "step_ms_p25", "step_ms_p75", "mfu", "tflops", "mem_peak_allocated_gib",
    "kernel_communication_ms", "exposed_communication_ms", "gpu_busy_share", "host_forward_ms", "host_backward_ms",
    "host_optimizer_ms", "train_loss", "validation_loss",
)  # fmt: skip
SEARCHED = (
    "largest_size", "estimated_size", "parameters", "n_layers", "d_model", "weights_share", "search_resolution", "search_s",
    "search_capped", "search_out_of_time", "states_gib",
)  # fmt: skip


@dataclass(frozen=True)
class Sharding(OfMachine):
    """The three studies on one machine; `studies` are the whole ones, whatever the reader's profile measures of them."""

    machine: str
    studies: dict[str, Study]
    runs: list[Run]

    @property
    def on_gpu(self) -> bool:
        return any(run.env.get("gpu") for run in self.runs)

    def run(self, key: str, study: str) -> Run:
        """The run of `study` that a row names (two studies may hold the same run)."""
        return next(run for run in self.runs if run.summary.id.key == key and run.summary.id.study == study)

    def rows(self, study: str, part: str) -> pd.DataFrame:
        """One row per measured variant (see `variant_rows`), with what its config says of processes, attention and model."""
        runs = [run for run in self.runs if run.summary.id.study == study]
        table = variant_rows(self.studies[study], runs, part, SEARCHED if study == "largest" else METRICS)
        if table.empty:
            return table
        facts = pd.DataFrame([_facts(self.run(key, study)) for key in table["key"]])
        return pd.concat([table, facts], axis=1)

    def sittings(self, *parts: str) -> str:
        """See `variants.sittings`: the runs of some parts of the study of FSDP."""
        return sittings([run for run in self.runs if run.summary.id.study == "fsdp" and run.summary.id.part in parts])


def load_sharding(own_runs: list[str], profile: str | None) -> list[Sharding]:
    """The studies on every machine that there are records of: the reader's own first, then the committed ones."""
    session = Session(profile)
    whole = Profile(profile="none", description="the whole study", gpu=None)
    studies = {name: load_study(session.root, name, whole) for name in STUDIES}
    reports = session.root / "reports"
    runs = [run for name in STUDIES for run in select_runs(name, session.runs_root, reports, own_runs)]
    return [Sharding(machine, studies, some) for machine, some in by_machine(runs).items()]


def good(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that ended well."""
    return rows[rows["outcome"] == "ok"] if len(rows) else rows


def unsteady(rows: pd.DataFrame) -> str | None:
    """Names the run whose steps vary most, if their quartiles lie further apart than `UNSTEADY` of the median."""
    spread = (rows["step_ms_p75"] - rows["step_ms_p25"]) / rows["step_ms"] if len(rows) else pd.Series(dtype=float)
    if not (many := int((spread > UNSTEADY).sum())):
        return None
    worst = rows.loc[spread.idxmax()]
    return (
        f"*Unsteady:* in {many} of {len(rows)} runs the quartiles of the steps lie more than {UNSTEADY:.0%} of the median apart, furthest in "
        f"{run_link(worst['label'], worst['key'])} ({worst['step_ms_p25']:,.0f} to {worst['step_ms_p75']:,.0f} ms): comparisons with these are rough. "
        "Another program at work on the machine can do that."
    )


def size_of(parameters: float) -> str | None:
    """A number of parameters in words; None if it is not known."""
    if not parameters > 0:
        return None
    return f"{parameters / 1e9:,.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:,.3g} M"


def _facts(run: Run) -> dict[str, object]:
    config = run.config
    train = config.get("train", config)
    parallel, model, attention = train["parallel"], train["model"], train["attention"]
    fp8 = train.get("fp8", "none")
    fp8 = fp8["recipe"] if isinstance(fp8, dict) else fp8
    return {
        "processes": parallel["fsdp"] * parallel["replicate"],
        "offload": parallel.get("cpu_offload", False),
        # A peer's config names its kernel in one word, and has no micro-batches.
        "attention": attention["backend"] if isinstance(attention, dict) else attention,
        "precision": train["precision"],
        "grad_checkpoint": train.get("grad_checkpoint", "none"),
        "resharded": parallel["reshard_after_forward"],
        "fp8": fp8 != "none",
        "fp8_gather": parallel.get("fp8_gather", False) or ("framework" in train and fp8 != "none"),
        "batch": train["batch_size"] * train.get("grad_accum", 1),
        "seq_len": train["seq_len"],
        "layers": model["n_layers"],
        "width": model["d_model"],
        "factor": model["n_layers"] / 8,
        "planned_parameters": count_parameters(ModelConfig.model_validate(model)).total,
    }
