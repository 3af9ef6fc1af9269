"""The hardware chapter: the machines behind the report and their measured ceilings beside the data sheets."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd

from lsai_core.profiling.flops import theoretical_peak
from lsai_lab.kit.style import apply_style, series_style
from lsai_lab.report.selection import select_runs
from lsai_lab.report.show import show_figure, show_table, show_text
from lsai_lab.runs.records import Run
from lsai_lab.runs.session import Session

_DTYPES = ("fp32", "tf32", "bf16", "fp8")


def load(own_runs: list[str], profile: str | None) -> list[Run]:
    """The newest good ceilings record of every machine."""
    apply_style()
    session = Session(profile)
    runs = select_runs("machine", session.runs_root, session.root / "reports", own_runs)
    newest = {
        run.machine: run for run in sorted(runs, key=lambda run: run.summary.started) if run.summary.outcome == "ok"
    }
    return list(newest.values())


def show_machines(runs: list[Run]) -> None:
    """Hardware and software, one column per machine."""
    if not runs:
        show_text("No machine has been measured yet: `make run STUDY=machine` does it.")
        return
    facts = {
        "GPU": lambda env: env.get("gpu") or "none",
        "GPUs": lambda env: env.get("gpu_count"),
        "GPU memory (GiB)": lambda env: env.get("gpu_memory_gib"),
        "CPU": lambda env: f"{env.get('cpu')}, {env.get('cpu_cores')} cores",
        "memory (GiB)": lambda env: env.get("memory_gib"),
        "operating system": lambda env: env.get("os"),
        "Python": lambda env: env.get("python"),
        "PyTorch": lambda env: env.get("torch"),
        "CUDA": lambda env: env.get("cuda"),
        "driver": lambda env: env.get("driver"),
    }
    table = pd.DataFrame({"": list(facts)})
    for run in runs:
        env = run.env
        table[run.machine] = [str(value) if (value := fact(env)) is not None else "–" for fact in facts.values()]
    show_table(table, "tbl-machines", "Hardware and software of the machines behind this report.")


def show_ceilings(runs: list[Run]) -> None:
    """Measured ceilings of each machine as a table, beside the data sheet's peaks as a figure."""
    rows = []
    for run in runs:
        results, gpu = run.summary.results, run.env.get("gpu")
        for dtype in _DTYPES:
            value = results.get(f"matmul_{dtype}_tflops")
            if value is None:
                continue
            peak = theoretical_peak(gpu, dtype) if gpu else None
            rows.append(
                {
                    "machine": run.machine,
                    "key": run.summary.id.key,
                    "what": f"matmul {dtype}, n = {results[f'matmul_{dtype}_size']}",
                    "measured": f"{value:,.4g} TFLOP/s",
                    "quartiles": f"{results[f'matmul_{dtype}_tflops_p25']:,.4g} to {results[f'matmul_{dtype}_tflops_p75']:,.4g}",
                    "data sheet (dense)": f"{peak.tflops:,.4g} TFLOP/s" if peak else "–",
                    "of data sheet": f"{value / peak.tflops:.0%}" if peak else "–",
                }
            )
        for name, what in (("copy", "copy in memory"), ("h2d", "host to GPU"), ("d2h", "GPU to host")):
            value = results.get(f"{name}_gb_per_s")
            if value is not None:
                low, high = results[f"{name}_gb_per_s_p25"], results[f"{name}_gb_per_s_p75"]
                quartiles = f"{low:,.4g} to {high:,.4g}"
                rows.append(
                    {"machine": run.machine, "key": run.summary.id.key, "what": what, "measured": f"{value:,.4g} GB/s",
                     "quartiles": quartiles, "data sheet (dense)": "–", "of data sheet": "–"}
                )  # fmt: skip
    if not rows:
        return
    show_table(
        pd.DataFrame(rows),
        "tbl-ceilings",
        "Measured ceilings: the best of several sizes of plain library matrix products on random data, and memory copies "
        "(bytes read plus bytes written within one memory, bytes moved between two). Medians of repeats; on a CPU the fastest "
        "repeat, since other work on the machine only slows it.",
        links={"measured": "key"},
    )
    _figure(runs)


def _figure(runs: list[Run]) -> None:
    rows = []
    for run in runs:
        for dtype in _DTYPES:
            if (value := run.summary.results.get(f"matmul_{dtype}_tflops")) is not None:
                rows.append({"machine": run.machine, "dtype": dtype, "TFLOP/s": value})
    frame = pd.DataFrame(rows)
    fig, axes = plt.subplots(figsize=(6.3, 2.6))
    for index, (machine, some) in enumerate(frame.groupby("machine", sort=False)):
        style = {**series_style(index), "linestyle": "none", "markersize": 7}
        axes.plot(some["TFLOP/s"], some["dtype"], label=machine, **style)
        for value, dtype in zip(some["TFLOP/s"], some["dtype"], strict=True):
            axes.annotate(
                f"{value:,.0f}" if value >= 100 else f"{value:.3g}",
                (value, dtype),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    axes.set(xscale="log", xlabel="measured TFLOP/s (log scale)", ylabel="precision")
    axes.margins(x=0.12, y=0.25)
    fig.legend(loc="outside lower center", ncols=2)
    show_figure(
        fig, "fig-ceilings", "Measured matrix-product ceilings of the machines behind this report, by precision."
    )
