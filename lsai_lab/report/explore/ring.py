"""The explorable of attention over several GPUs: who computes which part of the causal triangle in
which step, what is sent before it, and how fast the methods were measured to be."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from lsai_core.context.layout import Layout
from lsai_core.context.methods import ContextSetting
from lsai_core.context.plan import Plan, Task
from lsai_lab.report.load import points, recorded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Attention over several GPUs, step by step"
METHODS = {
    "ring": "ring",
    "zigzag": "zigzag ring",
    "lightseq": "LightSeq",
    "ulysses": "Ulysses",
    "usp": "USP",
}
GPU_COUNTS = (2, 4, 8)
LENGTH = 65536  # of the sequence that is planned
HEADS, KV_HEADS, HEAD_DIM = 32, 32, 128  # Llama-2-7B's, in bf16
MIB = 2**20


def plan_of(method: str, gpus: int) -> dict[str, Any]:
    """The steps of `method` over `gpus` GPUs.

    `groups`: how many groups of heads are computed beside each other, each by a ring of its own.
    `cells`: of the first group [query chunk, key chunk, GPU of the ring, step], the sequence cut
    into two chunks a GPU; `work`: of each step the share of all query-key pairs of the group that
    each GPU of the ring computes; `sent`: MiB that each GPU sends in the forward pass, before the
    first step, for each step, and after the last; `most_sent`: what one sends at most in all.
    `efficiency`: the share of the time that the GPUs compute if each step waits for its slowest.
    """
    setting = ContextSetting(method, LENGTH)
    plan, layout, pieces = setting.plan(gpus), setting.layout(gpus), setting.pieces(gpus)
    whole = sum(plan.pairs())
    around = _exchanged(gpus, pieces)
    work = [
        [
            sum(t.pairs for task in step for t in task.tiles if task.worker == rank) / whole
            for rank in range(plan.size)
        ]
        for step in plan.steps
    ]
    sent = [
        [around[0]] * plan.size,
        *(_sent(step, plan.size, pieces) for step in plan.steps),
        [around[1]] * plan.size,
    ]
    return {
        "groups": pieces,
        "cells": _cells(plan, layout),
        "work": work,
        "sent": sent,
        "most_sent": max(map(sum, zip(*sent, strict=True))),
        "efficiency": sum(map(sum, work)) / plan.size / sum(map(max, work)),
    }


def _cells(plan: Plan, layout: Layout) -> list[list[int]]:
    """The chunk pairs that the plan's tiles touch, with worker and step."""
    chunk = LENGTH // (2 * plan.size)
    found: dict[tuple[int, int], list[int]] = {}
    for number, step in enumerate(plan.steps):
        for task in step:
            queries = layout.ring_positions(task.q_owner)
            keys = layout.ring_positions(task.k_owner)
            for tile in task.tiles:
                for q in range(tile.q0, tile.q1, chunk):
                    for k in range(tile.k0, tile.k1, chunk):
                        place = (int(queries[q]) // chunk, int(keys[k]) // chunk)
                        if place[1] <= place[0]:
                            found[place] = [*place, task.worker, number]
    return list(found.values())


def _sent(step: tuple[Task, ...], size: int, pieces: int) -> list[float]:
    """MiB that each GPU of a ring sends for one step: keys and values to the worker, or queries
    there and the results back."""
    sent = Counter[int]()
    heads, kv_heads = HEADS // pieces, KV_HEADS // pieces
    for task in step:
        (q0, q1), (k0, k1) = task.q_range, task.k_range
        if task.k_owner != task.worker:
            sent[task.k_owner] += 2 * 2 * (k1 - k0) * kv_heads * HEAD_DIM
        if task.q_owner != task.worker:
            sent[task.q_owner] += 2 * (q1 - q0) * heads * HEAD_DIM
            sent[task.worker] += (2 * HEAD_DIM + 4) * (q1 - q0) * heads  # the output and its lse
    return [round(sent[rank] / MIB, 2) for rank in range(size)]


def _exchanged(gpus: int, pieces: int) -> tuple[float, float]:
    """MiB that a GPU sends to exchange slices for heads: before, and after."""
    moved = (pieces - 1) / pieces * 2 * LENGTH / gpus * HEAD_DIM / MIB
    return round(moved * (HEADS + 2 * KV_HEADS), 2), round(moved * HEADS, 2)


def data() -> dict[str, Any]:
    """Every plan, and the measured speeds with the same heads."""
    return {
        "title": "Attention over several GPUs.",
        "about": "A color is a GPU. Step through it, or play it.",
        "fields": {
            "method": {"label": "method", "choices": list(METHODS.items())},
            "gpus": {"label": "GPUs", "choices": list(GPU_COUNTS), "value": 4},
            "step": {"label": "step", "range": [1, max(GPU_COUNTS), 1], "value": 2},
        },
        "methods": METHODS,
        "length": LENGTH,
        "plans": {
            method: {str(gpus): plan_of(method, gpus) for gpus in GPU_COUNTS} for method in METHODS
        },
        "measured": _measured(),
    }


def _measured() -> list[dict[str, Any]]:
    """TFLOP/s of a GPU and the MiB that it `sent`, forward and backward (medians), by `gpus`,
    `method` and `length`, on the machine with the most points for these heads."""
    runs = recorded("context")
    found = points(
        runs[runs["main"] & (runs["outcome"] == "ok")], ["heads", "kv_heads", "processes", "gpu"]
    )
    found = found[
        (found["outcome"] == "ok")
        & (found["measure"] == "time")
        & (found["heads"] == HEADS)
        & (found["kv_heads"] == KV_HEADS)
        & found["method"].isin([*METHODS, "one"])
    ]
    places = ["gpu", "processes", "method", "length"]
    names = {"processes": "gpus", "training_tflops": "tflops", "sent_training_mib": "sent"}
    values = ["training_tflops", "sent_training_mib"]
    middle = found.fillna({"sent_training_mib": 0}).groupby(places)[values].median().round(1)
    renamed = middle.reset_index().astype({"processes": int, "length": int}).rename(columns=names)
    return [{str(k): v for k, v in row.items()} for row in renamed.to_dict("records")]


def picture(data: dict[str, Any]) -> Figure:
    """The triangles of four GPUs for the methods with one group of heads."""
    import numpy as np
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure as New

    from lsai_lab.report.colors import PALETTE

    figure = New(figsize=(6.3, 2.1), layout="constrained")
    shown = [name for name in METHODS if data["plans"][name]["4"]["groups"] == 1]
    for axes, name in zip(figure.subplots(1, len(shown)), shown, strict=True):
        grid = np.full((8, 8), np.nan)
        for query, key, worker, _ in data["plans"][name]["4"]["cells"]:
            grid[query, key] = worker
        axes.imshow(grid, cmap=ListedColormap(PALETTE[:4]))
        axes.set(title=METHODS[name], xticks=[], yticks=[], xlabel="keys", ylabel="queries")
    return figure
