"""The chapter of the course's jobs: one table and the plots of `params/plots/course.yaml`, machine by machine.

The published figure stands beside runs that have its setting; where the setting differs, the chapter says that it cannot be
compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from lsai_lab.kit.style import apply_style
from lsai_lab.report.plots import PlotConfig, Published, caption, check_plots, draw, load_plots
from lsai_lab.report.selection import select_runs
from lsai_lab.report.show import run_link, show_figure, show_table, show_text
from lsai_lab.report.variants import OfMachine, by_machine, endings, setting_row, variant_rows
from lsai_lab.runs.records import Run, recorded_runs
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import Study

_METRICS = (
    "tokens_per_s", "mfu", "mem_peak_allocated_gib", "train_s", "first_step_s", "train_loss", "validation_loss",
)  # fmt: skip


@dataclass(frozen=True)
class Course(OfMachine):
    """The course's jobs on one machine: `rows` as `variant_rows` makes them, with `speedup` over the baseline."""

    machine: str
    study: Study
    plots: PlotConfig
    rows: pd.DataFrame
    runs: list[Run]

    @property
    def ok(self) -> pd.DataFrame:
        return self.rows[(self.rows["outcome"] == "ok") & self.rows["tokens_per_s"].notna()]

    @property
    def published(self) -> list[Published]:
        """Published figures whose setting these runs have."""
        return [p for p in self.plots.published if any(p.comparable(run) for run in self.runs)]


def load(own_runs: list[str], profile: str | None) -> list[Course]:
    """The study on every machine that there are records of; a sentence if there is none."""
    apply_style()
    found = load_results(own_runs, profile)
    if not found:
        show_text("There are no records of this study yet: `make run STUDY=course` makes them.")
    return found


def load_results(own_runs: list[str], profile: str | None) -> list[Course]:
    """The study on every machine that there are records of."""
    session = Session(profile)
    study, plots = session.study("course"), load_plots(session.root, "course")
    runs = select_runs("course", session.runs_root, session.root / "reports", own_runs)
    if not runs:
        return []
    check_plots(plots, study, runs, recorded_runs(session.root / "reports"))
    return [
        Course(machine, study, plots, _with_speedup(variant_rows(study, some, plots.part, _METRICS), study), some)
        for machine, some in by_machine(runs).items()
    ]


def show_setting(courses: list[Course]) -> None:
    """What was trained, one row per machine, and the jobs in words."""
    if not courses:
        return
    rows = [setting_row(c.runs, int(c.rows["repeats"].max())) for c in courses]
    show_table(pd.DataFrame(rows), "tbl-course-setting", "What was trained, on each machine.")
    jobs = [
        {"job": v.label, "name": f"`{name}`", "what it is": v.note} for name, v in courses[0].study.variants.items()
    ]
    show_table(pd.DataFrame(jobs), "tbl-course-jobs", "The three jobs.")


def show_machine(course: Course) -> None:
    """Sentences, table and plots of one machine."""
    show_text(f"## The jobs on {course.machine} {{#sec-course-{course.slug}}}")
    show_text("\n".join(f"- {sentence}" for sentence in sentences(course)))
    _table(course)
    for plot in course.plots.plots:
        label = f"fig-course-{plot.name}-{course.slug}"
        if (figure := draw(plot, course.plots, course.study, course.runs)) is not None:
            show_figure(figure, label, caption(plot, course.plots, course.study, course.runs, course.machine))
        else:
            show_text(f"*{plot.title}*: no run on {course.machine} has `{plot.metric}`, so there is no plot of it.")


def sentences(course: Course) -> list[str]:
    """What this machine's numbers say: speed, the published figure, loss, and what did not run."""
    rows, found = course.ok, []
    base = rows[rows["variant"] == course.study.baseline]
    for _, row in rows.iterrows():
        name = f"**{run_link(row['label'], row['key'])}**"
        text = f"{name} trains {row['tokens_per_s']:,.0f} tokens/s"
        text += f" at an MFU of {row['mfu']:.1%}" if row["mfu"] == row["mfu"] else ""
        if len(base) and row["variant"] != course.study.baseline:
            text += f", {row['speedup']:.2f} times the baseline"
            change = row["validation_loss"] - base.iloc[0]["validation_loss"]
            text += f"; its validation loss differs from the baseline's by {change:+.4f} nats per token"
        found.append(text + ".")
    for other in course.published:
        if len(rows) and (rate := other.results.get("tokens_per_s")):
            best = rows.loc[rows["tokens_per_s"].idxmax()]
            found.append(
                f"The fastest job, {best['label']}, is {best['tokens_per_s'] / rate:.2f} times as fast as the {rate:,.0f} "
                f"tokens/s of {other.source}; that is another machine and another program, at the same model, sequence and batch."
            )
    if not course.published:
        sources = "; ".join(other.source for other in course.plots.published)
        found.append(
            f"These runs have another setting than the published figure ({sources}), so the two are not compared."
        )
    return found + endings(course.rows)


def table(course: Course) -> pd.DataFrame:
    """One row per job, then one per published figure of the same setting."""
    rows = course.rows
    shown = pd.DataFrame(
        {
            "job": rows["label"],
            "key": rows["key"],
            "tokens/s": rows["tokens_per_s"],
            "speed-up": rows["speedup"],
            "MFU (%)": rows["mfu"] * 100,
            "peak memory (GiB)": rows["mem_peak_allocated_gib"],
            "time (s)": rows["train_s"],
            "first step (s)": rows["first_step_s"],
            "train loss": rows["train_loss"],
            "val. loss": rows["validation_loss"],
            "outcome": rows["outcome"],
        }
    )
    others = [
        {"job": other.label, "key": "", "tokens/s": other.results.get("tokens_per_s"),
         "MFU (%)": 100 * other.results["mfu"] if "mfu" in other.results else None, "outcome": "published"}
        for other in course.published
    ]  # fmt: skip
    if others:
        shown = pd.concat([shown, pd.DataFrame(others)], ignore_index=True)
        rates = [other.results["tokens_per_s"] for other in course.published if "tokens_per_s" in other.results]
        shown.insert(4, "x published", shown["tokens/s"] / rates[0] if rates else None)
    return shown


def _table(course: Course) -> None:
    shown = table(course)
    config = course.runs[0].config
    sources = "".join(f" The row *{other.label}*: {other.source}." for other in course.published)
    if (shown["outcome"] == "ok").all():
        shown = shown.drop(columns="outcome")
    compiled = any(run.config["compile"] for run in course.runs)
    peak = next((r.summary.results["mfu_peak_source"] for r in course.runs if r.summary.results.get("mfu")), None)
    formats = {
        "tokens/s": "{:,.0f}", "speed-up": "{:.2f}x", "x published": "{:.2f}x", "MFU (%)": ".1f", "peak memory (GiB)": ".2f",
        "time (s)": ".1f", "first step (s)": ".1f", "train loss": ".3f", "val. loss": ".3f",
    }  # fmt: skip
    show_table(
        shown,
        f"tbl-course-{course.slug}",
        f"The jobs on {course.machine}: {config['steps']} steps of {config['batch_size'] * config['grad_accum']} x "
        f"{config['seq_len']} tokens. Speed is the median step after warm-up"
        + (f", MFU against {peak}" if peak else "")
        + f"; the time is that of all steps, with {'compilation and ' if compiled else ''}validation."
        + ("" if compiled else " Nothing is compiled here.")
        + sources,
        formats={name: form for name, form in formats.items() if name in shown},
        links={"job": "key"},
    )


def _with_speedup(rows: pd.DataFrame, study: Study) -> pd.DataFrame:
    base = rows[(rows["variant"] == study.baseline) & (rows["outcome"] == "ok")]
    return rows.assign(speedup=rows["tokens_per_s"] / base.iloc[0]["tokens_per_s"] if len(base) else float("nan"))
