"""What the memory chapter shows, machine by machine: setting, comparison, memory, figures, analysis.

Also writes the machine-readable forms beside the records: `experiment_summary.json` and `comparison_report.txt`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from lsai_core.files import write_json, write_text
from lsai_lab.kit.style import apply_style
from lsai_lab.report.memory import figures
from lsai_lab.report.memory.analysis import analysis, speed_spread
from lsai_lab.report.memory.table import MachineResults, machine_results
from lsai_lab.report.selection import select_runs
from lsai_lab.report.show import show_figure, show_table, show_text
from lsai_lab.runs.session import Session


def load(own_runs: list[str], profile: str | None, study: str = "memory") -> list[MachineResults]:
    """The study's results on every machine that there are records of: the reader's own first, then the committed ones."""
    apply_style()
    session = Session(profile)
    return machine_results(
        session.study(study), select_runs(study, session.runs_root, session.root / "reports", own_runs)
    )


def show_setting(all_results: list[MachineResults]) -> None:
    """What was trained, where: one row per machine."""
    if not all_results:
        show_text("There are no records of this study yet: `make run STUDY=memory` makes them.")
        return
    rows = []
    for results in all_results:
        config, env = results.config, results.runs[0].env
        model = config["model"]
        rows.append(
            {
                "machine": results.machine,
                "device": env.get("gpu") or f"{env.get('cpu')}, {env.get('cpu_cores')} cores",
                "model": f"{model['preset']}: {model['n_layers']} layers, d {model['d_model']}, "
                f"{int(results.ok['parameters'].max()) / 1e6 if len(results.ok) else 0:.1f} M parameters",
                "text": config["data"]["source"],
                "batch x sequence": f"{config['batch_size']} x {config['seq_len']}",
                "steps": config["steps"],
                "repeats": int(results.rows["repeats"].max()),
            }
        )
    show_table(pd.DataFrame(rows), "tbl-memory-setting", "What was trained, on each machine.")


def show_techniques(all_results: list[MachineResults]) -> None:
    """The eight techniques in words."""
    if all_results:
        variants = all_results[0].study.variants
        rows = [{"technique": v.label, "name": f"`{name}`", "what it does": v.note} for name, v in variants.items()]
        show_table(pd.DataFrame(rows), "tbl-memory-techniques", "The techniques that are compared.")


def show_machine(results: MachineResults) -> None:
    """Everything about the study on one machine."""
    show_text(f"## Results on {results.machine} {{#sec-memory-{results.slug}}}")
    for sentence in analysis(results):
        show_text(f"- {sentence}")
    _comparison_table(results)
    _memory_table(results)
    if len(results.ok):
        _figures(results)


def show_beside(all_results: list[MachineResults]) -> None:
    """All machines in one figure."""
    fig = figures.beside(all_results)
    if fig:
        show_figure(
            fig,
            "fig-memory-machines",
            "Speed and peak memory of every variant relative to the baseline of the same machine: "
            + ", ".join(results.machine for results in all_results)
            + ". Ratios compare machines fairly where absolute numbers cannot.",
        )


def _comparison_table(results: MachineResults) -> None:
    rows = results.rows
    table = pd.DataFrame(
        {
            "variant": rows["label"],
            "key": rows["key"],
            "tokens/s": rows["tokens_per_s"],
            "speed-up": rows["speedup"],
            "step (ms)": rows["step_ms"],
            "MFU (%)": rows["mfu"] * 100 if rows["mfu"].notna().any() else rows["mfu"],
            "total (s)": rows["train_s"],
            "train loss": rows["train_loss"],
            "val. loss": rows["validation_loss"],
            "val. perplexity": rows["validation_perplexity"],
            "outcome": rows["outcome"],
        }
    )
    if (rows["outcome"] == "ok").all():
        table = table.drop(columns="outcome")
    config = results.config
    spread = speed_spread(results)
    repeats = int(rows["repeats"].max())
    note = (
        f" Over {repeats} repeats with different seeds: medians, for losses and perplexities means; speeds of one variant "
        f"differ by at most {spread:.1%}."
        if repeats > 1
        else ""
    )
    source = next(
        (run.summary.results.get("mfu_peak_source") for run in results.runs if run.summary.results.get("mfu")), ""
    )
    show_table(
        table,
        f"tbl-memory-{results.slug}",
        f"The comparison on {results.machine}: {config['steps']} steps of {config['batch_size'] * config['grad_accum']} x "
        f"{config['seq_len']} tokens. Speed is the median step after warm-up; MFU against {source}; *total* is the time of "
        f"all steps, first calls and validation included.{note}",
        formats={
            "tokens/s": "{:,.0f}",
            "speed-up": "{:.2f}x",
            "step (ms)": "{:,.1f}",
            "MFU (%)": "{:.1f}",
            "total (s)": "{:,.1f}",
            "train loss": ".3f",
            "val. loss": ".3f",
            "val. perplexity": ".2f",
        },
        links={"variant": "key"},
    )


def _memory_table(results: MachineResults) -> None:
    rows = results.rows
    columns = {
        "forward (GiB)": "mem_forward_peak_gib",
        "backward (GiB)": "mem_backward_peak_gib",
        "optimizer (GiB)": "mem_optimizer_peak_gib",
        "peak (GiB)": "mem_peak_allocated_gib",
        "reserved (GiB)": "mem_peak_reserved_gib",
        "of baseline": "memory_share",
        "largest batch": "largest_batch",
    }
    present = {title: name for title, name in columns.items() if name in rows and rows[name].notna().any()}
    if not present:
        return
    table = pd.DataFrame({"variant": rows["label"], "key": rows["key"], **{t: rows[n] for t, n in present.items()}})
    links = {"variant": "key"}
    if "largest batch" in present:
        table["batch_key"], links["largest batch"] = rows["batch_key"], "batch_key"
    kinds = sorted(
        {str(r.summary.results.get("memory_kind")) for r in results.runs if r.summary.results.get("memory_kind")}
    )
    search = next(
        (r.summary.results for r in results.runs if r.summary.id.part == "batch" and r.summary.outcome == "ok"), None
    )
    limit = (
        f" The largest batch is what really trained within {search['search_limit_gib']:.1f} GiB "
        f"({search['search_limit_kind']}), found to {search['search_resolution']:.0%}."
        if search
        else ""
    )
    show_table(
        table,
        f"tbl-memory-peaks-{results.slug}",
        f"Peak memory of the phases of one step on {results.machine} ({', '.join(kinds)}), largest over the measured "
        f"steps.{limit}",
        formats={
            title: ".0%" if name == "memory_share" else "{:,.0f}" if name == "largest_batch" else ".3f"
            for title, name in present.items()
        },
        links=links,
    )


def _figures(results: MachineResults) -> None:
    where, slug = results.machine, results.slug
    size = f"batch {results.config['batch_size']}, sequence {results.config['seq_len']}"
    if fig := figures.memory_bars(results):
        show_figure(
            fig, f"fig-memory-peaks-{slug}", f"Peak memory of each phase of a training step on {where} ({size})."
        )
    caption = f"Training speed at equal batch on {where} ({size})"
    if results.rows["repeats"].max() > 1:
        caption += "; the line at the end of a bar spans the repeats"
    if fig := figures.speed_bars(results):
        show_figure(fig, f"fig-memory-speed-{slug}", caption + ".")
    if fig := figures.largest_batch_bars(results):
        show_figure(fig, f"fig-memory-batch-{slug}", f"The largest batch that really trained on {where}.")
    if fig := figures.pareto_scatter(results):
        show_figure(
            fig,
            f"fig-memory-pareto-{slug}",
            f"Speed and quality against peak memory on {where}. The dashed line joins the variants that no "
            f"other beats in both (peaks within {figures.SAME_MEMORY:.0%} count as equal).",
        )
    show_figure(
        figures.loss_curves(results),
        f"fig-memory-loss-{slug}",
        f"Training loss at equal tokens on {where}, smoothed; first repeat of each variant.",
    )


def export(all_results: list[MachineResults], runs_root: Path | None = None) -> list[Path]:
    """Write `experiment_summary.json` and `comparison_report.txt` of the reader's own runs; returns their paths."""
    folder = (runs_root or Session().runs_root) / "memory"
    written: list[Path] = []
    for results in all_results:
        if "(" not in results.machine:  # committed results have their records already
            continue
        rows = json.loads(results.rows.to_json(orient="records"))
        summary = {"machine": results.machine, "baseline": results.study.baseline, "variants": rows}
        write_json(folder / "experiment_summary.json", summary)
        text = [f"{results.study.title} on {results.machine}", "", results.rows.to_string(index=False), ""]
        text += [f"- {sentence}" for sentence in analysis(results)]
        write_text(folder / "comparison_report.txt", "\n".join(text) + "\n")
        written += [folder / "experiment_summary.json", folder / "comparison_report.txt"]
    return written
