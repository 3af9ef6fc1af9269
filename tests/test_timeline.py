"""The timeline of a step: on a run's page and in a notebook, from what the run left in its folder;
and any training loop, watched."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHECKOUT, Project, tiny, write_run
from torch import nn

import lsai_lab as lab
from lsai_core.base.errors import UserError
from lsai_core.config.precision import weight_dtype
from lsai_core.prediction.simulate import simulate
from lsai_core.profiling.watch import GIB
from lsai_lab.report.runpages import write_run_pages
from lsai_lab.report.step import pictures, recorded, traced
from lsai_lab.report.timelines import memory_picture
from lsai_lab.runs.records import read_run


def svg(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def titles(picture: ElementTree.Element) -> list[str]:
    return [str(element.text) for element in picture.iter() if element.tag.endswith("title")]


def train_loop(steps: int = 8, width: int = 64) -> tuple[Any, nn.Module]:
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with lab.watch(model, optimizer) as seen:
        for _ in range(steps):
            model(torch.randn(128, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen, model


def test_a_loop_of_anybodys_is_watched() -> None:
    seen, model = train_loop()
    bytes_of = sum(p.nbytes for p in model.parameters())
    assert seen.memory["weights"] == pytest.approx(bytes_of / GIB)
    # two moments a weight, and the counts of steps
    assert seen.memory["optimizer"] == pytest.approx(2 * bytes_of / GIB, rel=0.001)
    assert list(seen.phases["phase"]) == ["forward", "backward", "optimizer"]
    # input, hidden before and after ReLU, output and its square at the end of the forward pass
    kept = 4 * 128 * (64 + 2 * 256 + 2 * 64)
    assert kept * 0.8 < seen.moments["activations"].max() * GIB < kept * 1.3
    last = seen.moments.query("phase == 'backward'").iloc[-1]
    assert last["gradients"] == pytest.approx(bytes_of / GIB)
    assert {"matmul", "optimizer"} <= set(seen.kernels["class"])
    assert seen.step_ms > 0 and seen.phases["ms"].gt(0).all()
    assert "weights" in repr(seen) and "<table>" in seen._repr_html_()
    pictures = re.findall(r"<svg.*?</svg>", seen.plot().data, re.S)
    assert len(pictures) == 2
    assert any("weights: at most" in title for title in titles(svg(pictures[0])))


def test_a_short_loop_says_how_far_it_came() -> None:
    seen, _ = train_loop(steps=1)
    assert "steps seen: 1; memory takes 2, kernels and times 6" in repr(seen)
    with pytest.raises(UserError, match="steps seen: 1"):
        seen.plot()
    with pytest.raises(UserError, match="a model with parameters"):
        lab.watch(nn.ReLU(), torch.optim.SGD([torch.zeros(1, requires_grad=True)]))


def test_watching_leaves_no_hooks_and_changes_no_loss() -> None:
    def losses(watched: bool) -> list[float]:
        torch.manual_seed(0)
        model, found = nn.Linear(8, 8), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loop() -> None:
            for _ in range(7):
                loss = model(torch.ones(4, 8)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())

        if watched:
            with lab.watch(model, optimizer):
                loop()
        loop()
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
        return found[:7]

    assert losses(True) == losses(False)


def test_the_simulated_moments_end_where_the_prediction_says() -> None:
    config, moments = tiny(), []
    found = simulate(config, on="cpu", moments=moments)
    assert max(sum(sizes.values()) for _, sizes in moments) == found.peak
    by_phase = {
        phase: max(sum(sizes.values()) for p, sizes in moments if p == phase)
        for phase in found.phases
    }
    assert by_phase == found.phases
    weights = {sizes["weights"] for _, sizes in moments}
    assert len(weights) == 1 and weights.pop() % weight_dtype(config.precision).itemsize == 0


@pytest.fixture(scope="module")
def run(new_project: Callable[..., Project]) -> tuple[Project, Path]:
    project = new_project()
    pairs = ["--set", "profile.trace=true", "--set", "profile.memory_steps=2"]
    code, _, err = project.lsai("train", *pairs)
    assert code == 0, err
    return project, project.found()["baseline"].folder


def test_the_page_of_a_traced_run_shows_memory_and_kernels(run: tuple[Project, Path]) -> None:
    project, folder = run
    write_run_pages([read_run(folder)], project.root / "reports")
    (page,) = (project.root / "reports" / "runs" / "memory").glob("baseline-*.html")
    text = page.read_text()
    memory, kernels = map(svg, re.findall(r"<svg.*?</svg>", text, re.S))
    results = read_run(folder).summary.results
    said = " ".join(titles(memory))
    for phase in ("forward", "backward", "optimizer"):
        assert f"measured peak of the {phase}: {results[f'mem_{phase}_peak_gib']:.3g} GiB" in said
    assert "activations: at most" in said and "gradients: at most" in said
    lanes = [element.text for element in kernels.iter() if element.tag.endswith("text")]
    assert any(str(text).startswith("matmul ") for text in lanes)
    assert any(str(text).startswith("optimizer ") for text in lanes)
    assert "style=" not in "".join(re.findall(r"<svg.*?</svg>", text, re.S)), "the policy of a page"
    assert 'role="img"' in text and "aria-label=" in text


def test_own_times_of_operators_add_up_to_the_time_in_which_any_ran(
    run: tuple[Project, Path],
) -> None:
    """How much of a step that is depends on the machine: Python between them takes the rest."""
    events = sorted(traced(run[1]), key=lambda event: event.start_ms)
    assert {"matmul", "optimizer"} <= {event.label for event in events}
    assert all(0 <= event.ms <= event.end_ms - event.start_ms + 1e-6 for event in events)
    any_ran, until = 0.0, events[0].start_ms
    for event in events:
        any_ran += max(0.0, event.end_ms - max(event.start_ms, until))
        until = max(until, event.end_ms)
    assert sum(event.ms for event in events) == pytest.approx(any_ran, rel=0.01)


def test_a_snapshot_is_drawn_beside_and_nothing_in_it_runs(run: tuple[Project, Path]) -> None:
    _, folder = run
    path = folder / "memory-snapshot.pickle"
    events = [{"action": "alloc", "size": 2**30, "time_us": 1000 * ms} for ms in range(5)]
    events += [
        {"action": "free_completed", "size": 2**30, "time_us": 1000 * ms} for ms in range(5, 9)
    ]
    block = {"size": 3 * 2**30, "state": "active_allocated"}
    snapshot = {"device_traces": [events], "segments": [{"blocks": [block]}]}
    try:
        path.write_bytes(pickle.dumps(snapshot))
        run_ = read_run(folder)
        run_.summary.results["step_ms"] = 1e6
        curve = recorded(run_)
        assert curve[0] == (0.0, 3.0) and max(gib for _, gib in curve) == 7.0
        assert curve[-1] == (8.0, 3.0)
        assert "recorded: at most 7 GiB" in pictures(run_)[0]
        path.write_bytes(pickle.dumps({"device_traces": Path("/")}))
        with pytest.raises(UserError, match="is damaged"):
            recorded(run_)
    finally:
        path.unlink()


@pytest.mark.parametrize("text", [None, "plain", "[1]", "{}"])
def test_a_damaged_trace_is_one_line(tmp_path: Path, text: str | None) -> None:
    # packed here: packed bytes hold the time, and would give a test another name each second
    packed = {None: b"", "plain": b"{}"}
    content = packed[text] if text in packed else gzip.compress(str(text).encode())
    (tmp_path / "trace.json.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"trace\.json\.gz is damaged"):
        traced(tmp_path)


def test_names_of_kernels_are_no_markup(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "kernel", "ts": 1.0, "dur": 2.0, "name": "<script>alert(1)</script>"}
    text = json.dumps({"traceEvents": [event, {**event, "ts": 9.0}]})
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(text.encode()))
    folder = write_run(tmp_path / "runs", "memory", "baseline", kind="gemm")
    (folder / "trace.json.gz").write_bytes((tmp_path / "trace.json.gz").read_bytes())
    (picture,) = pictures(read_run(folder))
    assert "<script" not in picture
    assert any("<script>alert(1)</script>: 0.002 ms" in title for title in titles(svg(picture)))


def test_no_run_of_a_bench_has_a_timeline() -> None:
    folder = next((CHECKOUT / "reports" / "recorded" / "h100" / "gemm").glob("*"))
    with pytest.raises(UserError, match="is no training run, and nothing was traced"):
        lab.timeline(folder)


def test_the_peaks_words_stand_above_all_lines_and_ticks_are_round() -> None:
    moments = [("forward", {"weights": 2**30}), ("backward", {"weights": 2**31})]
    drawn = memory_picture(moments, measured={"backward": 2.1, "forward": 1.5})
    (peak,) = re.findall(r'<text x="[\d.]+" y="([\d.]+)"[^>]*>peak 2 GiB', drawn)
    dashed = re.findall(r'y1="([\d.]+)"[^>]*stroke-dasharray', drawn)
    assert len(dashed) == 2 and float(peak) < min(map(float, dashed))
    assert re.findall(r'text-anchor="end"[^>]*>([\d.]+)<', drawn) == ["0", "0.5", "1", "1.5", "2"]
