"""The section on whole training steps over shared sequences: cost, the same loss, and the longest sequences."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lsai_core.config import ModelConfig
from lsai_core.profiling.flops import flops_per_token
from lsai_lab.report.selection import select_runs
from lsai_lab.report.show import run_link, show_table, show_text
from lsai_lab.report.variants import OfMachine, by_machine
from lsai_lab.runs.records import Run
from lsai_lab.runs.session import Session

STUDY = "longcontext"
_RESULTS = (
    "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "step_ms", "mem_peak_allocated_gib", "exposed_communication_ms", "train_loss",
)  # fmt: skip


_DECIDES_LOSS = (
    "model",
    "precision",
    "init_from",
    "data",
    "seq_len",
    "batch_size",
    "grad_accum",
    "steps",
    "seed",
    "optim",
)


@dataclass(frozen=True)
class Trained(OfMachine):
    """The study's runs on one machine."""

    machine: str
    runs: list[Run]

    @property
    def steps(self) -> pd.DataFrame:
        """One row per run that ended well, by model and length, then processes."""
        rows = [
            _facts(run.config, run) | {name: run.summary.results.get(name) for name in _RESULTS}
            for run in self.runs
            if run.summary.kind == "train" and run.summary.outcome == "ok"
        ]
        frame = pd.DataFrame(rows)
        return frame.sort_values(["model", "tokens", "processes"], ignore_index=True) if rows else frame

    @property
    def longest(self) -> pd.DataFrame:
        """One row per search for layers at a length."""
        rows = []
        for run in self.runs:
            if run.summary.kind != "model_search":
                continue
            results = run.summary.results
            fitting = [one for one in results.get("tries", []) if one["outcome"] == "ok"]
            best: dict[str, Any] = max(fitting, key=lambda one: one["size"], default={})
            facts = _facts(run.config["train"], run) | {"wanted": run.config["max_size"]}
            rows.append(
                facts
                | {
                    "layers": results.get("largest_size"),
                    "peak_gib": best.get("peak_gib"),
                    "seconds": best.get("seconds"),
                    # Missing in records of older code.
                    **{name: best.get(name) for name in ("step_s", "allocated_gib", "states_gib", "host_gib", "loss")},
                }
                | {"outcome": run.summary.outcome}
            )
        return pd.DataFrame(rows)


def load_trained(own_runs: list[str], profile: str | None) -> list[Trained]:
    """The reader's own machine first, then the committed ones."""
    session = Session(profile)
    runs = select_runs(STUDY, session.runs_root, session.root / "reports", own_runs)
    return [Trained(machine, some) for machine, some in by_machine(runs).items()]


def _facts(config: dict[str, Any], run: Run) -> dict[str, Any]:
    parallel, model = config["parallel"], config["model"]
    flops = flops_per_token(ModelConfig.model_validate(model), config["seq_len"])
    return {
        "model": model["preset"],
        "key": run.summary.id.key,
        "tokens": config["seq_len"],
        "causal": flops.causal_discounted / flops.convention,
        "processes": parallel["fsdp"] * parallel["replicate"] * parallel.get("cp", 1),
        "method": parallel.get("cp_method") if parallel.get("cp", 1) > 1 else None,
        # One process takes steps as several do if they agree in all of this.
        "learned": json.dumps([config.get(name) for name in _DECIDES_LOSS], sort_keys=True),
    }


def loss_differences(trained: Trained) -> pd.DataFrame:
    """Of each run over several processes, the largest absolute difference of its training loss from one process's at the same step
    (nats per token and as a share of it), where there is one that learns the same."""
    steps = trained.steps
    found = []
    for row in steps[steps["processes"] > 1].itertuples() if len(steps) else []:
        same = steps[(steps["learned"] == row.learned) & (steps["processes"] == 1)]
        if same.empty:
            continue
        ours, alone = (_losses(trained, key) for key in (row.key, same["key"].iloc[0]))
        gap = (ours - alone).abs().dropna()
        if len(gap):
            found.append(
                {**row._asdict(), "first": float(gap.iloc[0]), "largest": float(gap.max()), "share": float((gap / alone).max()), "steps": len(gap)}
            )  # fmt: skip
    return pd.DataFrame(found)


def _losses(trained: Trained, key: str) -> pd.Series:
    run = next(run for run in trained.runs if run.summary.id.key == key)
    return run.metrics.dropna(subset=["loss"]).set_index("step")["loss"]


def show_training(machines: list[Trained]) -> None:
    """Tables and sentences of every machine; one sentence where nothing was run."""
    if not any(len(trained.steps) or len(trained.longest) for trained in machines):
        show_text(f"No training over shared sequences is recorded yet: `make run STUDY={STUDY}` does it.")
    for trained in machines:
        _steps(trained)
        for row in loss_differences(trained).itertuples():
            name = run_link(f"{row.model}, {row.tokens:,} tokens on {row.processes}", row.key)
            show_text(
                f"- *The same loss* on {trained.machine}: {name} differs from one process by {row.first:.1e} nats per token in the first step, with the same weights, and by at most "
                f"{row.largest:.1e} ({row.share:.1e} of the loss) over {row.steps} steps."
            )
        _longest(trained)
        for run in trained.runs:
            if run.summary.outcome not in ("ok", "oom"):
                name = run_link(run.summary.id.name, run.summary.id.key)
                show_text(f"- {name} on {trained.machine} ended as **{run.summary.outcome}** ({run.summary.reason}).")


def _what(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """The columns that tell which training a row is."""
    tokens = rows["tokens"].map("{:,}".format)
    return {"model": rows["model"], "key": rows["key"], "tokens": tokens, "processes": rows["processes"]}


def _steps(trained: Trained) -> None:
    rows = trained.steps
    if rows.empty:
        return
    table = pd.DataFrame(
        {
            **_what(rows),
            "method": rows["method"],
            "step (ms)": rows["step_ms"],
            "tokens/s each": rows["tokens_per_s_per_gpu"],
            "MFU (%)": 100 * pd.to_numeric(rows["mfu"]),
            "causal MFU (%)": 100 * pd.to_numeric(rows["mfu"]) * rows["causal"],
            "exposed (%)": 100 * pd.to_numeric(rows["exposed_communication_ms"]) / pd.to_numeric(rows["step_ms"]),
            "peak each (GiB)": rows["mem_peak_allocated_gib"],
            "training loss": rows["train_loss"],
        }
    ).dropna(axis="columns", how="all")
    formats = {
        "step (ms)": "{:,.0f}",
        "tokens/s each": "{:,.0f}",
        "MFU (%)": ".1f",
        "exposed (%)": ".1f",
        "peak each (GiB)": ".3g",
        "training loss": ".4f",
    }
    show_table(
        table,
        f"tbl-context-steps-{trained.slug}",
        f"Whole training steps on {trained.machine}: one sequence a step, shared by all processes. MFU counts full attention, as everywhere; the causal one only the pairs that the mask lets through.",
        formats={name: form for name, form in formats.items() if name in table},
        links={"model": "key"},
    )


def _longest(trained: Trained) -> None:
    rows = trained.longest
    if rows.empty:
        return
    table = pd.DataFrame(
        {
            **_what(rows),
            "layers that took a step": [
                f"{int(found)} of {wanted}" if pd.notna(found) else None
                for found, wanted in zip(rows["layers"], rows["wanted"], strict=True)
            ],
            "step (s)": rows["step_s"],
            "s with the start": rows["seconds"],
            "peak each (GiB)": rows["allocated_gib"],
            "reserved each (GiB)": rows["peak_gib"],
            "AdamW states each (GiB)": rows["states_gib"],
            "host, all (GiB)": rows["host_gib"],
            "loss": rows["loss"],
            "outcome": rows["outcome"],
        }
    ).dropna(axis="columns", how="all")
    formats = {"step (s)": ".0f", "s with the start": ".0f", "loss": ".2f"} | dict.fromkeys(
        ("peak each (GiB)", "reserved each (GiB)", "AdamW states each (GiB)", "host, all (GiB)"), ".1f"
    )
    show_table(
        table,
        f"tbl-context-longest-{trained.slug}",
        f"The longest sequences on {trained.machine}: a whole training step that was really taken, with AdamW's states in place, on random tokens. "
        "It is the first one, so its time includes compilation and, where inputs wait on the host, the pinning of its memory.",
        formats={name: form for name, form in formats.items() if name in table},
        links={"model": "key"},
    )
