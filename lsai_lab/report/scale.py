"""The chapter "What changes at 8, 64 and 512 nodes": one `scale` record and its config's assumptions, put through the formulas
of `lsai_lab.report.scale_model`. Every figure is labelled measured, computed, extrapolated or assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from lsai_core.config import ModelConfig
from lsai_core.model import count_parameters
from lsai_core.profiling.flops import flops_per_token
from lsai_lab.benches.scale import Assumptions, ScaleConfig, read_config
from lsai_lab.data.dataset import BLOCK, MAX_BLOCKS_CHECKED
from lsai_lab.kit.style import apply_style, series_style
from lsai_lab.report.scale_model import CALLS, WEIGHT_BYTES, daly, fit, state_bytes, step_seconds, step_traffic
from lsai_lab.report.selection import OWN, select_runs
from lsai_lab.report.show import run_link, show_figure, show_table, show_text
from lsai_lab.runs.records import Run, recorded_runs
from lsai_lab.runs.session import Session


@dataclass
class Scale:
    """One record, its config, and the MFU that compute time is taken from, with where that comes from."""

    run: Run
    config: ScaleConfig
    mfu: float
    mfu_source: str

    @property
    def results(self) -> dict[str, Any]:
        return self.run.summary.results

    def link(self, text: str) -> str:
        return run_link(text, self.run.summary.id.key)

    def compute_s(self, model: ModelConfig) -> float:
        """Seconds that a step's FLOPs take one GPU at `mfu`."""
        a = self.config.assume
        return a.tokens_per_gpu * flops_per_token(model, a.seq_len).convention / (self.mfu * a.peak_tflops * 1e12)

    @property
    def layout(self) -> dict[str, Any]:
        """The measured layout of most processes."""
        return max(self.results["layouts"], key=lambda row: row["shard"] * row["replicate"])

    @property
    def checkpoint_bytes_per_parameter(self) -> float:
        return self.layout["checkpoint_bytes"] / count_parameters(self.config.model).total


def load(own_runs: list[str], profile: str | None) -> Scale | None:
    """The newest good record, of this machine if there is one; None (and a sentence) if there is none."""
    apply_style()
    session = Session(profile)
    reports = session.root / "reports"
    runs = [r for r in select_runs("scale", session.runs_root, reports, own_runs) if r.summary.outcome == "ok"]
    if not runs:
        show_text("Nothing has been measured for this chapter yet: `lsai study scale` does it, within a minute.")
        return None
    run = max(runs, key=lambda r: (OWN in r.machine, r.summary.started))
    config = read_config(run.config)
    trained = [r for r in recorded_runs(reports) if r.summary.kind == "train" and r.summary.outcome == "ok"]
    on_gpu = [r for r in trained if "data sheet" in str(r.summary.results.get("mfu_peak_source"))]
    best = max(on_gpu, key=lambda r: r.summary.results["mfu"], default=None)
    if best is None:
        return Scale(run, config, config.assume.mfu, "assumed, since no recorded run on a GPU tells")
    source = f"of the recorded run {run_link(best.summary.id.name, best.summary.id.key)} on {best.machine}"
    return Scale(run, config, best.summary.results["mfu"], source)


def groups(scale: Scale) -> pd.DataFrame:
    """One row per model, number of nodes and way to group the GPUs: computed memory, traffic and time."""
    a, rows = scale.config.assume, []
    for name, model in scale.config.shapes.items():
        for nodes in scale.config.nodes:
            gpus, seen = nodes * a.gpus_per_node, set()
            plans = [(f"HSDP, {k} node{'s' if k > 1 else ''}", k * a.gpus_per_node) for k in scale.config.shard_nodes]
            for plan, shard in [("FSDP, all", gpus), *plans]:
                if shard in seen or shard > gpus or gpus % shard:
                    continue
                seen.add(shard)
                traffic = step_traffic(model, shard, gpus // shard, scale.config.precision)
                bandwidth, latency = step_seconds(traffic, a)
                rows.append(
                    {"model": name, "nodes": nodes, "plan": plan, "shard": shard, "replicas": gpus // shard,
                     "states_gib": state_bytes(model, shard, scale.config.precision) / 2**30,
                     **{f"{call}_gb": traffic.sent[call] / 1e9 for call in CALLS},
                     "bandwidth_s": bandwidth, "latency_s": latency, "seconds": bandwidth + latency,
                     "of_compute": (bandwidth + latency) / scale.compute_s(model)}
                )  # fmt: skip
    return pd.DataFrame(rows)


def best_groups(frame: pd.DataFrame, assume: Assumptions) -> pd.DataFrame:
    """The fastest row of each model and number of nodes among those whose states fit; none that fits: the smallest."""
    chosen = []
    for _, some in frame.groupby(["model", "nodes"], sort=False):
        fits = some[some["states_gib"] <= assume.memory_for_states_gib]
        chosen.append(fits.loc[fits["seconds"].idxmin()] if len(fits) else some.loc[some["states_gib"].idxmin()])
    return pd.DataFrame(chosen)


def show_groups(scale: Scale) -> None:
    a, frame = scale.config.assume, groups(scale)
    layout = [
        f"HSDP\u00a0{row.replicas}×{row.shard}" if row.replicas > 1 else f"FSDP\u00a0{row.shard}"
        for row in frame.itertuples()
    ]
    table = frame.drop(columns=["seconds", "shard", "replicas"]).assign(plan=layout).rename(
        columns={"plan": "GPUs", "states_gib": "states GiB", "all_gather_gb": "gather GB", "reduce_scatter_gb": "scatter GB",
                 "all_reduce_gb": "all-reduce GB", "bandwidth_s": "moving s", "latency_s": "waiting s",
                 "of_compute": "of compute"}
    )  # fmt: skip
    three = {name: ".3g" for name in table.columns if name.endswith((" GiB", " GB", " s"))}
    show_table(
        table,
        "tbl-scale-groups",
        f"**Computed** per GPU and step, {a.gpus_per_node} GPUs a node, {scale.config.precision}, {a.tokens_per_gpu:,} "
        "tokens a GPU: states (weights, gradients, AdamW), bytes sent in ring collectives, seconds of moving them and of ring "
        f"latency, and both as a share of the time that the step's FLOPs take at an MFU of {scale.mfu:.2f} "
        f"({scale.mfu_source}; a higher MFU raises the share in proportion). HSDP c×n is c copies over n GPUs each. **Assumed** links: NVLink {a.nvlink_gb_per_s:g} GB/s and {a.nvlink_latency_us:g} µs, "
        f"network {a.network_gb_per_s:g} GB/s per GPU and {a.network_latency_us:g} µs.",
        formats={**three, "of compute": ".0%"},
    )
    names = list(scale.config.shapes)
    fig, panels = plt.subplots(1, len(names), figsize=(6.3, 2.7), squeeze=False)
    for axes, name in zip(panels[0], names, strict=True):
        some = frame[frame["model"] == name]
        for index, (plan, line) in enumerate(some.groupby("plan", sort=True)):
            axes.plot(line["nodes"], line["seconds"], label=plan, **series_style(index))
        axes.axhline(scale.compute_s(scale.config.shapes[name]), color="#444444", linewidth=1, label="compute")
        axes.set(xscale="log", yscale="log", xlabel="nodes", title=name)
        axes.set_xticks(scale.config.nodes, [str(n) for n in scale.config.nodes])
        axes.minorticks_off()
    panels[0][0].set_ylabel("seconds per step")
    fig.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    show_figure(
        fig,
        "fig-scale-groups",
        "Computed communication per step, if none of it hides behind computation, beside the step's computation. What lies "
        "above the line cannot be hidden. A plan that equals FSDP over all GPUs is drawn as that.",
    )


def show_validation(scale: Scale) -> None:
    rows, gaps = [], []
    for row in scale.results["layouts"]:
        traffic = step_traffic(scale.config.model, row["shard"], row["replicate"], scale.config.precision)
        counted = sum(row[f"{call}_bytes"] for call in CALLS)
        wire = row["wire_bytes"]
        gaps += [wire / traffic.sent_by_gloo - 1] if wire else []
        rows.append(
            {"processes": row["shard"] * row["replicate"], "shard": row["shard"], "replicas": row["replicate"],
             "predicted kB": sum(traffic.bytes.values()) / 1e3, "counted kB": counted / 1e3,
             "predicted on the wire kB": traffic.sent_by_gloo / 1e3, "written to sockets kB": wire / 1e3 if wire else None,
             "checkpoint shards": row["checkpoint_shard_files"],
             "bytes/parameter": row["checkpoint_bytes"] / count_parameters(scale.config.model).total}
        )  # fmt: skip
    exact = sum(r["predicted kB"] == r["counted kB"] for r in rows)
    onwire = (
        f", and what the sockets carry differs by {min(gaps):+.2%} to {max(gaps):+.2%} from the prediction"
        if gaps
        else ""
    )
    show_text(
        f"The formulas can be checked on {max(r['processes'] for r in rows)} CPU processes: {exact} of {len(rows)} layouts "
        f"hand exactly the predicted bytes to their collectives{onwire} (@tbl-scale-counted)."
    )
    show_table(
        pd.DataFrame(rows),
        "tbl-scale-counted",
        f"**Measured** in {scale.link('one FSDP2 step')} of a small model over gloo: full buffers counted at the dispatcher, bytes written "
        "to sockets by the busiest process (framing included; gloo reduce-scatters by an all-reduce, which its prediction "
        "includes), and the checkpoint of that step.",
        formats={name: ",.1f" for name in rows[0] if name.endswith("kB")} | {"bytes/parameter": ".2f"},
    )


def law(scale: Scale, kind: str, power: int) -> tuple[float, float]:
    """`fit` to the measured times to meet of two and more: one alone waits for nobody."""
    points = [p for p in scale.results[kind] if p[kind] > 1]
    return fit([p[kind] for p in points], [p["seconds"] for p in points], power)


def start(scale: Scale) -> pd.DataFrame:
    """Seconds to meet per number of nodes, each with whether it was measured or extrapolated."""
    a, rows = scale.config.assume, []
    for nodes in scale.config.nodes:
        row: dict[str, Any] = {"nodes": nodes, "ranks": nodes * a.gpus_per_node}
        for kind, n, power in (("agents", nodes, 2), ("clients", nodes * a.gpus_per_node, 1)):
            points = {p[kind]: p["seconds"] for p in scale.results[kind]}
            offset, slope = law(scale, kind, power)
            row[f"{kind}_s"] = points.get(n, offset + slope * n**power)
            row[kind] = (
                "measured" if n in points else "interpolated" if min(points) < n < max(points) else "extrapolated"
            )
        rows.append(row)
    return pd.DataFrame(rows)


def show_start(scale: Scale) -> None:
    frame = start(scale)
    slowest = max(scale.results["clients"], key=lambda p: p["slowest_s"] - p["seconds"])
    cells = [
        f"{row.nodes} nodes: {row.agents_s:.3g} s ({row.agents}) for {row.nodes} agents, {row.clients_s:.2g} s "
        f"({row.clients}) for {row.ranks} ranks"
        for row in frame.itertuples()
        if row.nodes > 1
    ]
    show_text(
        f"{'; '.join(cells)}. Of the store's {scale.config.repeats} repeats each, the farthest from its median took {slowest['slowest_s']:.2g} s "
        f"instead of {slowest['seconds']:.2g} s ({slowest['clients']} ranks)."
    )
    fig, axes = plt.subplots(figsize=(6.3, 2.8))
    grid = np.geomspace(2, max(scale.config.nodes) * scale.config.assume.gpus_per_node, 200)
    labels = (("agents", "agents, torchrun's rendezvous (one per node)", 2), ("clients", "ranks, one TCPStore", 1))
    for index, (kind, label, power) in enumerate(labels):
        style = series_style(index)
        points = pd.DataFrame(scale.results[kind])
        offset, slope = law(scale, kind, power)
        last = max(scale.config.nodes) * (scale.config.assume.gpus_per_node if kind == "clients" else 1)
        x = grid[grid <= last]
        axes.plot(points[kind], points["seconds"], label=label, **{**style, "linestyle": "none"})
        axes.plot(x, offset + slope * x**power, **{**style, "marker": ""})
        axes.plot([last], [offset + slope * last**power], **{**style, "markerfacecolor": "white", "linestyle": "none"})
    axes.set(xscale="log", yscale="log", xlabel="participants", ylabel="seconds until all have met")
    axes.legend()
    show_figure(
        fig,
        "fig-scale-start",
        f"**Measured** on one machine, {scale.link('all participants as threads')} (filled); lines are least-squares fits, a + b n² "
        "for agents, which all rewrite one shared state, and a + b n for ranks; open markers are **extrapolated** to "
        f"{max(scale.config.nodes)} nodes, {max(scale.config.nodes) / max(scale.config.agents):.1f} times beyond the last measured "
        "number of agents: an order of magnitude, no more. Threads share this machine's cores and loopback has no distance, so the growth is "
        "likely too steep and the constant too low.",
    )


def files(scale: Scale) -> pd.DataFrame:
    """Computed load on the file system per model and number of nodes."""
    a, r, rows = scale.config.assume, scale.results, []
    # Beside one file per rank, the metadata and the mark of completeness, as counted.
    extra = scale.layout["checkpoint_files"] - scale.layout["checkpoint_shard_files"]
    for name, model in scale.config.shapes.items():
        for nodes in scale.config.nodes:
            ranks = nodes * a.gpus_per_node
            size = 3 * WEIGHT_BYTES[scale.config.precision] * count_parameters(model).total
            write_s, mtbf_s = size / (a.filesystem_gb_per_s * 1e9), a.node_mtbf_days * 86400 / nodes
            interval, lost = daly(write_s, mtbf_s)
            rows.append(
                {"model": name, "nodes": nodes, "checkpoint files": ranks + extra, "GB per rank": size / ranks / 1e9,
                 "write s": write_s, "interval min": interval / 60, "lost": lost, "1 % interval min": 100 * write_s / 60,
                 "study files": a.variants * a.repeats * (r["record_files"] + 2 * ranks + 1)}
            )  # fmt: skip
    return pd.DataFrame(rows)


def show_files(scale: Scale) -> None:
    a, r = scale.config.assume, scale.results
    check = MAX_BLOCKS_CHECKED * BLOCK / 2**30
    took = f"{r['record_write_s'] * 1e3:.0f} ms"
    show_text(
        f"A training record is {r['record_files']} files and {r['record_bytes'] / 1e3:,.0f} kB (the median of "
        f"{r['records_counted']} counted). Writing one anew, each file with write, fsync and rename, took "
        f"{scale.link(took)}, {r['record_files_per_s']:,.0f} files/s on this disk. "
        f"At its start each rank checks up to {check:g} GiB of token files; if the ranks of a node share its page cache, "
        f"{max(scale.config.nodes)} nodes read up to {check * max(scale.config.nodes):,.0f} GiB (computed)."
    )
    show_table(
        files(scale),
        "tbl-scale-files",
        f"**Computed** from @tbl-scale-counted: one checkpoint ({3 * WEIGHT_BYTES[scale.config.precision]} bytes a parameter; "
        f"{scale.checkpoint_bytes_per_parameter:.2f} measured on a small model, whose metadata weighs more), its write time at an **assumed** "
        f"{a.filesystem_gb_per_s:g} GB/s for the whole file system, the Young/Daly interval and the time lost at an assumed "
        f"{a.node_mtbf_days:g} days between failures of a node, and the interval at which writing alone costs 1 %. Files of a study of {a.variants} variants "
        f"with {a.repeats} repeats, one job each: records and two log files a rank.",
        formats={"lost": ".2%", "GB per rank": ".3g", "write s": ".3g", "interval min": ".3g", "1 % interval min": ".3g"},
    )  # fmt: skip


def show_advice(scale: Scale) -> None:
    a, frame = scale.config.assume, groups(scale)
    best, load_, begin = best_groups(frame, a), files(scale), start(scale)
    lines = []
    for name in scale.config.shapes:
        rows = best[(best["model"] == name) & (best["nodes"] > 1)]
        parts = [f"{row.plan} at {row.nodes} nodes ({row.of_compute:.0%} of compute)" for row in rows.itertuples()]
        last, plain = rows.iloc[-1], frame[(frame["model"] == name) & (frame["replicas"] == 1)].iloc[-1]
        lines.append(
            f"- **Group, {name}**: {', '.join(parts)}: the fastest whose states fit in {a.memory_for_states_gib:g} GiB. At "
            f"{last.nodes} nodes it communicates {plain.seconds / last.seconds:.1f} times faster than FSDP over all GPUs, for "
            f"{last.states_gib:.3g} instead of {plain.states_gib:.2g} GiB of states."
        )
        some = load_[load_["model"] == name].iloc[-1]
        verdict = "not above" if round(some["lost"], 4) <= 0.01 else "above"
        lines.append(
            f"- **Checkpoints, {name}, {some['nodes']} nodes**: every {some['interval min']:.0f} min, {some['lost']:.2%} lost to "
            f"writing and to repeated work ({verdict} 1 %); writing alone costs less than 1 % from "
            f"{some['1 % interval min']:.1f} min on. {some['checkpoint files']:,} files each time."
        )
    first, last_start = begin.iloc[0], begin.iloc[-1]
    lines.append(
        f"- **Start**: torchrun's rendezvous goes from {first.agents_s:.2g} s ({first.agents}) to {last_start.agents_s:.2g} s "
        f"({last_start.agents}) at {last_start.nodes} nodes, the ranks' store to {last_start.clients_s:.2g} s ({last_start.clients})."
    )
    logs = 2 * last_start.ranks + 1
    share = logs / (logs + scale.results["record_files"])
    seconds = logs / scale.results["record_files_per_s"]
    where = "to node-local disks, copied when a rank fails" if share > 0.5 else "beside the records"
    lines.append(
        f"- **Records**: of the files that a run on {last_start.nodes} nodes leaves, {share:.1%} are logs ({logs:,}, or "
        f"{seconds:.1f} s of this disk's file rate), so logs belong {where}; the {scale.results['record_files']} files of the "
        "record, which only rank 0 writes, stay on the shared file system."
    )
    show_text("\n".join(lines))
