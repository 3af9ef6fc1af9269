"""What the reader's own runs gave, beside the recorded ones: for the one chapter that changes with
them."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from lsai_core.base.errors import UserError
from lsai_lab.analysis.summary import relative, summarize
from lsai_lab.report.charts import panels
from lsai_lab.report.colors import COLORS
from lsai_lab.report.load import load, recorded
from lsai_lab.report.show import Table, table
from lsai_lab.report.studies import study
from lsai_lab.report.values import Format

_METRICS = {"speed": "tokens_per_s", "memory": "mem_peak_allocated_gib"}
_RATES = {
    "matmul in bf16 (TFLOP/s)": "matmul_bf16_tflops",
    "matmul in fp8 (TFLOP/s)": "matmul_fp8_tflops",
    "matmul in fp32 (TFLOP/s)": "matmul_fp32_tflops",
    "copy in memory (GB/s)": "copy_gb_per_s",
}


def own_runs() -> pd.DataFrame:
    """The reader's runs of the current plan, as `load` gives them."""
    runs = load()
    return runs[runs["own"].astype(bool)]


def or_nothing(
    frame: pd.DataFrame,
    formats: Mapping[str, Format] | None = None,
    *,
    link: str | None = None,
    after: str = "`make report`",
) -> Table:
    """`frame` as `lab.table` shows it; without rows what will stand there, and after what
    fills it (Markdown)."""
    if frame.empty:
        names = "; ".join(name for name in frame.columns if name != "run")
        return table(pd.DataFrame([{"will stand here": names, "appears after": after}]))
    return table(frame, formats, link=link)


def own_counts(own: pd.DataFrame) -> pd.DataFrame:
    """A row a study: how many runs there are, and how they ended."""
    rows = []
    for name, runs in own.groupby("study", sort=False):
        ends = runs["outcome"].value_counts()
        good, oom = (int(ends.get(end, 0)) for end in ("ok", "oom"))
        row = {"study": name, "runs": len(runs), "ended well": good, "out of memory": oom}
        rows.append(row | {"others": len(runs) - good - oom})
    return pd.DataFrame(rows, columns=["study", "runs", "ended well", "out of memory", "others"])


def own_ends(own: pd.DataFrame) -> pd.DataFrame:
    """A row a run that did not end well: `study`, `setting`, `part`, how it `ended`, `run`."""
    bad = own[own["outcome"] != "ok"].fillna({"reason": "no reason is known"})
    ended = "ended as " + bad["outcome"] + ": " + bad["reason"]
    rows = pd.DataFrame({"study": bad["study"], "setting": bad["label"], "part": bad["part"]})
    return rows.assign(ended=ended, run=bad["run"])


def own_rates() -> pd.DataFrame:
    """What each machine reaches, the reader's first: a row an operation, a column a machine, those
    of the recorded GPUs in capitals (`H100`)."""
    runs = load("machine")
    good = runs[runs["outcome"] == "ok"].drop_duplicates("machine", keep="last")
    rows: dict[str, pd.Series] = {}
    for words, column in _RATES.items():
        if column in good:
            rows[words] = good.set_index("machine")[column].astype(float)
    rates = pd.DataFrame(rows).T.reindex(list(_RATES))
    return rates.rename(columns={"h100": "H100", "h200": "H200"}).reset_index(names="operation")


def own_ratios(own: pd.DataFrame) -> pd.DataFrame:
    """A row a setting that ran here in a study with a baseline: speed and peak memory over the
    baseline's, here and as recorded (the machine that tells the study). Columns: `study`,
    `setting`, `machine`, `n`, `speed`, `speed, recorded`, `memory`, `memory, recorded`, `run`.
    Settings whose baseline did not run here are missing."""
    rows = []
    for (name, part), runs in own.groupby(["study", "part"], sort=False):
        baseline = _baseline(str(name))
        there = recorded(str(name)) if baseline else pd.DataFrame()
        told = there[there["main"].astype(bool) & (there["part"] == part)] if len(there) else there
        here = _relative(runs, baseline)
        elsewhere = _relative(told, baseline).drop_duplicates("variant").set_index("variant")
        for row in here.to_dict("records"):
            if row["variant"] != baseline:
                same = elsewhere.loc[row["variant"]] if row["variant"] in elsewhere.index else {}
                rows.append(_ratio(str(name), row, same))
    columns = ["study", "setting", "machine", "n"]
    columns += [f"{what}{whose}" for what in _METRICS for whose in ("", ", recorded")]
    return pd.DataFrame(rows, columns=[*columns, "run"])


def _ratio(name: str, row: dict[str, object], same: "pd.Series | dict[str, float]") -> dict:
    found = {"study": name, "setting": row["label"], "machine": row["machine"], "n": row["n"]}
    for what in _METRICS:
        found |= {what: row[what], f"{what}, recorded": same.get(what)}
    return found | {"run": row["run"]}


def _baseline(name: str) -> str | None:
    """The baseline of a study; None of a study that this laboratory does not know."""
    try:
        return study(name).baseline
    except UserError:
        return None


def _relative(runs: pd.DataFrame, baseline: str | None) -> pd.DataFrame:
    """A row a setting, with its speed and memory over those of `baseline` on the same machine."""
    if runs.empty or baseline not in set(runs["variant"]):
        return pd.DataFrame(columns=["variant", *_METRICS])
    rows = summarize(runs, list(_METRICS.values()))
    for what, metric in _METRICS.items():
        rows[what] = relative(rows, metric, baseline)
    return rows.dropna(subset=list(_METRICS), how="all")


def own_chart(ratios: pd.DataFrame) -> Figure:
    """The ratios of `own_ratios`: here (filled) and as recorded (hollow), speed and memory."""
    names = ratios["study"] + ": " + ratios["setting"]
    fig, axes = panels(2, height=0.9 + 0.22 * len(ratios), sharey=True)
    for ax, what in zip(axes, _METRICS, strict=True):
        places = range(len(ratios))
        ax.hlines(places, ratios[what], ratios[f"{what}, recorded"], color=COLORS["other"])
        ax.plot(ratios[what], places, "o", color=COLORS["ours"], label="here")
        elsewhere = ratios[f"{what}, recorded"]
        ax.plot(elsewhere, places, "o", mfc="white", color=COLORS["peer"], label="recorded")
        ax.axvline(1, color="#444444", linewidth=0.8)
        ax.set(xlabel=f"{what} over the baseline")
    axes[0].set_yticks(range(len(ratios)), list(names))
    axes[0].invert_yaxis()
    handles, words = axes[0].get_legend_handles_labels()
    fig.legend(handles, words, loc="outside lower center", ncols=2)
    return fig
