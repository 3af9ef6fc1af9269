"""The written analysis of the speed study: sentences computed from one machine's records."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from lsai_core.attention import available_backends
from lsai_lab.report.selection import OWN
from lsai_lab.report.show import run_link
from lsai_lab.report.speed.ideal import linear_tflops
from lsai_lab.report.speed.results import Speed, class_ms, good
from lsai_lab.report.variants import endings


def on_levers(speed: Speed) -> list[str]:
    """What the levers brought, what dominates now, how far it is from the ceiling, and what did not run."""
    rows, text = good(speed.levers), []
    if len(rows) > 1:
        first, best = rows.iloc[0], _fastest(rows)
        if best["variant"] == first["variant"]:
            text.append(
                f"*All levers:* none makes the step faster than {_name(first)} ({first['tokens_per_s']:,.0f} tokens/s)."
            )
        else:
            text.append(
                f"*All levers:* {_name(best)} trains {best['tokens_per_s']:,.0f} tokens/s, "
                f"{best['tokens_per_s'] / first['tokens_per_s']:.2f} times {_name(first)} ({first['tokens_per_s']:,.0f})."
            )
        gains = rows.dropna(subset=["gain"])
        largest, smallest = gains.loc[gains["gain"].idxmax()], gains.loc[gains["gain"].idxmin()]
        sentence = f"*Largest single gain:* {_name(largest)}, {largest['gain']:+.1%} on top of the one before it."
        if smallest["gain"] < 0:
            sentence += f" {_name(smallest)} makes the step slower ({smallest['gain']:+.1%})."
        text.append(sentence)
    if len(rows):
        text += [*_dominates(_fastest(rows), speed), *_distance(_fastest(rows), speed)]
    return [*text, *not_run(speed, "levers", speed.levers)]


def on_attention(speed: Speed) -> list[str]:
    """The fastest kernel, the time in attention itself, the leanest one, and what did not run."""
    rows, text = good(speed.attention), []
    full = rows[~rows["variant"].str.contains("window")] if len(rows) else rows
    if len(full) > 1:
        best, worst = _fastest(full), full.loc[full["tokens_per_s"].idxmin()]
        text.append(
            f"*Fastest with full attention:* {_name(best)}, {best['tokens_per_s']:,.0f} tokens/s, "
            f"{best['tokens_per_s'] / worst['tokens_per_s']:.2f} times {_name(worst)}."
        )
        low, high = full["validation_loss"].min(), full["validation_loss"].max()
        text.append(
            f"*Same function:* the validation losses of the {len(full)} kernels lie between {low:.4f} and {high:.4f} nats per "
            "token after the same few steps; what they learn over more of them is compared further down."
        )
        measured = full.dropna(subset=["mem_peak_allocated_gib"])
        if measured["mem_peak_allocated_gib"].nunique() > 1:
            most = measured.loc[measured["mem_peak_allocated_gib"].idxmax()]
            least = measured.loc[measured["mem_peak_allocated_gib"].idxmin()]
            text.append(
                f"*Peak memory:* from {least['mem_peak_allocated_gib']:.2f} GiB ({_name(least)}) to "
                f"{most['mem_peak_allocated_gib']:.2f} GiB ({_name(most)})."
            )
    return [*text, *not_run(speed, "attention", speed.attention)]


def not_run(speed: Speed, part: str, rows: pd.DataFrame) -> list[str]:
    """Sentences about the variants of a part that ended badly, or were never started, with what is known of the reason."""
    there = set(rows["variant"]) if len(rows) else set()
    gone = [name for name in speed.study.measured(part) if name not in there]
    sentences = endings(rows) if len(rows) else []
    if gone:
        reasons = [f"{speed.study.variants[name].label}{_reason(speed, name)}" for name in gone]
        sentences.append(f"*Not measured on {speed.machine}:* {'; '.join(reasons)}.")
    return sentences


def _reason(speed: Speed, variant: str) -> str:
    """Why a variant has no run, as far as that is known: of the reader's own machine only."""
    if OWN not in speed.machine:
        return ""
    if variant in speed.study.measured("attention"):
        backend = speed.study.variants[variant].config["attention"]["backend"]
        if missing := available_backends("cuda" if torch.cuda.is_available() else "cpu").get(backend):
            return f" ({backend} {missing})"
    return "" if variant in speed.planned else " (left out by this machine's profile)"


def _dominates(row: Any, speed: Speed) -> list[str]:
    times = class_ms(row)
    idle = times.pop("idle", 0.0)
    if not times:
        return []
    total = sum(times.values()) + idle
    largest = sorted(times.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{label} {ms:,.3g} ms ({ms / total:.0%})" for label, ms in largest)
    what = "kernels" if speed.on_gpu else "operators"
    text = f"*What the time is spent on:* the longest {what} of {_name(row)} are {shares} of {total:,.4g} ms."
    if speed.on_gpu:
        text += f" The GPU is idle for {idle:,.3g} ms ({idle / total:.1%})."
    return [text]


def _distance(row: Any, speed: Speed) -> list[str]:
    run, ideal = speed.run(row["key"]), speed.ideal(row["key"])
    if ideal is None:
        return []
    sources = "; ".join(speed.ceilings.source(dtype) for dtype in ideal.dtypes)
    text = (
        f"*How far from the ceiling:* at {sources} the FLOPs of this step would take {ideal.ms:,.4g} ms; it takes "
        f"{row['step_ms']:,.4g} ms, so it runs at {ideal.ms / row['step_ms']:.0%} of the ideal speed."
    )
    matmul_ms = class_ms(row).get("matmul", 0.0)
    if matmul_ms and speed.on_gpu:
        text += f" Its matrix products by themselves reach {linear_tflops(run.config, matmul_ms):,.0f} TFLOP/s."
    return [text]


def _fastest(rows: pd.DataFrame) -> Any:
    return rows.loc[rows["tokens_per_s"].idxmax()]


def _name(row: Any) -> str:
    return f"**{run_link(row['label'].removeprefix('+ '), row['key'])}**"
