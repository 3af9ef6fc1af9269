"""The explorables in a real browser: every control changes the picture to the value that the
package computes; by keyboard, on a phone, from a file and over http, and as widgets."""

from __future__ import annotations

import functools
import http.server
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHECKOUT
from test_book import browser, visit  # noqa: F401

from lsai_core.base.errors import UserError
from lsai_core.config.model import ModelConfig
from lsai_core.context.methods import ContextSetting
from lsai_core.optimizers.rounding import Noise, rounded
from lsai_core.prediction.memory import PARTS, predict, usable_gib
from lsai_core.profiling.gpus import find_gpu
from lsai_core.profiling.trace import KERNEL_CLASSES
from lsai_lab.predictions.steps import config_of
from lsai_lab.report.brand import brand_colors
from lsai_lab.report.colors import COLORS, KERNEL_COLORS, MEMORY_COLORS, ON_DARK, PALETTE
from lsai_lab.report.explore import ring
from lsai_lab.report.explore.scripts import FOLDER, NAMES, page_script, write_page_files
from lsai_lab.report.explore.show import module_of
from lsai_lab.report.load import load, session

# As of the report's pages: no code but the page's own, nothing from elsewhere.
POLICY = "default-src 'none'; img-src data:; script-src 'self' file:; style-src 'self' file:"
PAGE = """<!DOCTYPE html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{name}</title><link rel="icon" href="data:,">
<link rel="stylesheet" href="book.css"><link rel="stylesheet" href="explore.css">
<main><h1>{name}</h1><div class="explore" data-explore="{name}"></div></main>
<script defer src="{name}.js"></script>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a page for each explorable."""
    session.cache_clear()  # another file's tests may have left a project of theirs
    folder = tmp_path_factory.mktemp("explore")
    (folder / "book.css").write_text((CHECKOUT / "reports" / "book.css").read_text())
    for name in NAMES:
        write_page_files(name, module_of(name).data(), folder)
        (folder / f"{name}.html").write_text(PAGE.format(name=name, policy=POLICY))
    return folder


@pytest.fixture
def play(pages: Path, visit: Callable[..., Any]) -> Callable[..., Any]:  # noqa: F811
    return lambda name, width=1000, **options: visit(pages / f"{name}.html", width, **options)


def put(page: Any, within: int = 0, **values: Any) -> str:
    """Set controls as a hand does, and return what the explorable says then."""
    shown = page.locator(".explore:has(> form)").nth(within)
    for name, value in values.items():
        field = shown.locator(f"[name='{name}']")
        field.evaluate("field => field.closest('details')?.setAttribute('open', '')")
        if isinstance(value, bool):
            field.set_checked(value)
        elif field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(str(value))
        else:
            field.fill(str(value))
    return str(shown.locator(".answer").inner_text())


def noted(page: Any, name: str) -> str | None:
    """What stands beside a control."""
    label = page.locator(f"label:has([name='{name}'])")
    return label.get_attribute("data-note")  # type: ignore[no-any-return]


def listed(page: Any, within: int = 0) -> list[list[str]]:
    """The rows of the explorable's table of values, its alternative in text."""
    shown = page.locator(".explore:has(> form)").nth(within)
    return list(
        shown.locator(":scope > details tbody tr").evaluate_all(
            "rows => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
    )


def numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"-?\d[\d,]*\.?\d*", text)]


# The memory of a step


@pytest.mark.parametrize(
    ("checkpoint", "states", "gpus", "fused"),
    [
        ("none", "bf16", 1, True),
        ("full", "fp32", 1, True),
        ("none", "bf16", 1, False),
        ("selective", "8-bit", 4, True),
    ],
)
def test_the_memory_of_a_step_is_what_is_predicted(
    play: Callable[..., Any], checkpoint: str, states: str, gpus: int, fused: bool
) -> None:
    page = play("memory")
    said = put(page, states=states, checkpoint=checkpoint, gpus=gpus, tokens=13)
    if not fused:
        said = put(page, fused=False)
    found = predict(
        config_of("llama3-8b", states, "bf16", checkpoint, gpus, False, fused, tokens=8192)
    )
    peak, needs = re.search(r"peak is ([\d.]+) GiB .* needs ([\d.]+) GiB", said).groups()  # type: ignore[union-attr]
    assert float(peak) == pytest.approx(found.peak, rel=0.005)
    assert float(needs) == pytest.approx(found.needs, rel=0.005)
    fits = found.needs <= usable_gib(find_gpu("H100"))
    each = "one H100" if gpus == 1 else f"each of {gpus} H100s"
    assert f"on {each}" in said and said.startswith("It fits") == fits, said
    free = float(re.search(r"a run may use ([\d.]+) of", said)[1])  # type: ignore[index]
    if apart := re.search(r"([\d.]+) GiB (?:to spare|are missing)", said):
        assert float(apart[1]) == pytest.approx(abs(float(needs) - free), abs=0.01)
    rows = {name: float(value.replace(",", "")) for name, value in listed(page)}
    for name, size in found.parts.items():
        assert rows.get(name, 0) == pytest.approx(size, abs=0.006), name
    highest = max(sum(sizes) for sizes in zip(*found.timeline.values(), strict=True))
    assert highest == pytest.approx(found.peak, rel=1e-6)


def test_memory_follows_length_batch_and_gpus_between_predictions(
    play: Callable[..., Any],
) -> None:
    page = play("memory")
    said = put(
        page, model="llama3.2-1b", tokens=12, batch=3, gpus=8, checkpoint="full", gpu="A100-40"
    )
    found = predict(config_of("llama3.2-1b", checkpoint="full", gpus=8, tokens=3 * 4096))
    assert "between predictions" in said and "A100-40" in said
    said_gib = numbers(said.split("peak is")[1])[0]  # with one digit behind the point
    assert said_gib == pytest.approx(found.peak, abs=0.05 * found.peak + 0.05)
    assert "does not fit" in put(page, model="llama3-8b", gpus=1, tokens=15, checkpoint="none")
    put(page, tokens=12, batch=16)
    put(page, tokens=16)
    batch, fused = page.locator("[name=batch]"), page.locator("[name=fused]")
    assert batch.input_value() == batch.get_attribute("max") == "2", "no more than was predicted"
    assert noted(page, "batch") == "at most 131,072 tokens a GPU" and batch.is_enabled()
    put(page, tokens=17)
    assert batch.input_value() == "1" and batch.is_disabled(), "and what is left to choose"
    put(page, tokens=12, fused=False, checkpoint="full")
    assert noted(page, "batch") is None and batch.is_enabled()
    assert fused.is_disabled() and fused.is_checked(), "it stands as it is computed"
    assert noted(page, "fused") == "always on, except on one GPU without checkpointing"


# Attention over several GPUs


def test_ring_attention_shows_who_computes_waits_and_sends(play: Callable[..., Any]) -> None:
    page = play("ring")
    for method, gpus in (("ring", 4), ("zigzag", 8), ("lightseq", 4), ("usp", 4), ("ulysses", 2)):
        setting = ContextSetting(method, ring.LENGTH)
        plan, sent = setting.plan(gpus), ring.plan_of(method, gpus)["sent"]
        pairs = plan.pairs()
        slowest = sum(
            max(
                sum(t.pairs for task in step for t in task.tiles if task.worker == rank)
                for rank in range(plan.size)
            )
            for step in plan.steps
        )
        said = put(page, method=method, gpus=gpus)
        if page.locator("[name=step]").is_enabled():  # Ulysses has one step
            said = put(page, step=1)
        _, steps, *_ = numbers(said)
        assert steps == len(plan.steps), said
        share = numbers(said.split("compute ")[1])[0]
        assert share == pytest.approx(100 * sum(pairs) / plan.size / slowest, abs=0.06), method
        most = max(sum(step[rank] for step in sent) for rank in range(plan.size))
        assert numbers(said.split("up to ")[1])[0] == pytest.approx(most, abs=0.51)
        assert ("with the backward pass" in said) == (gpus < 8), "what was measured"
        colors = page.locator("svg").first.locator("rect, path")
        assert colors.count() == len(ring.plan_of(method, gpus)["cells"]) * setting.pieces(gpus)
    assert "3 of 4 GPUs wait" in put(page, method="ring", gpus=4, step=4)
    assert noted(page, "gpus") is None
    put(page, gpus=8)
    assert noted(page, "gpus") == "computed from the plan; speeds were measured on fewer"
    ends = page.locator("svg").last.locator("text").all_text_contents()
    assert {*ring.METHODS.values(), "one GPU alone"} <= {*ends}, "every line is named"


def test_the_ring_plays_by_itself_until_it_is_stopped(play: Callable[..., Any]) -> None:
    page = play("ring")
    page.get_by_role("button", name="Play").click()
    seen = set()
    for _ in range(60):
        seen.add(page.locator("[name=step]").input_value())
        page.wait_for_timeout(100)
    assert seen == {"1", "2", "3", "4"}, seen
    page.get_by_role("button", name="Stop").click()
    stopped = page.locator("[name=step]").input_value()
    page.wait_for_timeout(1300)
    assert page.locator("[name=step]").input_value() == stopped


def test_the_messages_of_a_plan_are_those_that_were_sent() -> None:
    """The recorded bytes of a forward pass, of the rank that sent most."""
    from lsai_lab.report.load import points

    runs = load("context")
    found = points(
        runs[runs["main"] & (runs["outcome"] == "ok")], ["heads", "kv_heads", "processes"]
    )
    found = found[
        (found["heads"] == ring.HEADS)
        & (found["kv_heads"] == ring.KV_HEADS)
        & (found["length"] == ring.LENGTH)
        & (found["measure"] == "time")
        & found["method"].isin([*ring.METHODS])
    ]
    assert len(found) >= 10
    for row in found.to_dict("records"):
        plan = ring.plan_of(row["method"], int(row["processes"]))
        most = max(sum(step[rank] for step in plan["sent"]) for rank in range(len(plan["sent"][0])))
        assert row["sent_forward_mib"] == pytest.approx(most, rel=0.001), row["method"]


# The roofline


def test_the_roofline_computes_the_least_time_of_an_operation(play: Callable[..., Any]) -> None:
    page = play("roofline")
    rates = module_of("roofline").data()["gpus"]["H200"]
    shape = ModelConfig(preset="course")
    d, f = shape.d_model, shape.d_ff
    for tokens, way, width in ((8192, "bf16", 2), (128, "fp8", 1)):
        put(page, operation="gate and up matmul", gpu="H200", format=way, tokens=math.log2(tokens))
        flop, moved = 4 * tokens * d * f, width * (2 * d * f + tokens * d) + 4 * tokens * f
        least = max(flop / rates[way] / 1e6, moved / rates["copy"] / 1e3)
        rows = dict(listed(page))
        assert numbers(rows["FLOPs"]) == [flop] and numbers(rows["bytes"]) == [moved]
        assert numbers(rows["at least (µs)"])[0] == pytest.approx(least, rel=0.001)
        balance = rates[way] / rates["copy"] * 1e3
        assert numbers(rows["balance (FLOPs per byte)"])[0] == pytest.approx(balance, rel=0.001)
    said = put(page, operation="residual sum", tokens=13, fused=True)
    assert "memory decides. Apart, 336 MB would move: fusing saves 67.1 MB." in said
    assert page.locator("[name=format]").is_disabled()
    assert noted(page, "format") == "fp8 is for matmuls"
    put(page, fused=False)
    said = put(page, operation="RMSNorm", tokens=0)
    assert "16.4 KFLOP and 16.4 KB, 1 FLOP/byte" in said
    assert "To start a kernel takes longer, about 5 µs." in said
    assert page.locator("[name=fused]").is_disabled(), "nothing follows it"
    said = put(page, operation="gate and up matmul", format="fp8", tokens=13)
    assert "To start" not in said
    said = put(page, gpu="A100-80")
    assert "On an A100-80 (by its data sheet) it takes at least" in said
    assert noted(page, "format") == "the A100-80 has no fp8"
    format_ = page.locator("[name=format]")
    assert format_.is_disabled() and format_.input_value() == "bf16", "as it is computed"
    said = put(page, operation="eager attention", fused=True)
    assert "arithmetic decides" in said and "fused" not in said.split(":")[0]
    size, heads, kv_heads = shape.head_dim, shape.n_heads, shape.n_kv_heads
    for power, sequences in ((0, 1), (13, 2)):
        put(page, operation="fused attention", tokens=power)
        rows, length = dict(listed(page)), 4096
        assert numbers(rows["FLOPs"]) == [sequences * 2 * heads * size * length**2]
        assert numbers(rows["bytes"]) == [sequences * 4 * length * size * (heads + kv_heads)]
    assert str(noted(page, "tokens")).startswith("whole sequences of 4,096")


def test_the_point_of_the_roofline_is_dragged(play: Callable[..., Any]) -> None:
    page = play("roofline")
    chart = page.locator("svg").bounding_box()
    before = page.locator("output").inner_text()
    page.mouse.move(chart["x"] + 700, chart["y"] + 100)
    page.mouse.down()
    page.mouse.move(chart["x"] + 300, chart["y"] + 100)
    page.mouse.up()
    after = page.locator("output").inner_text()
    assert numbers(after)[0] < 64 < numbers(before)[0]
    page.mouse.move(chart["x"] + 800, chart["y"] + 100)
    assert page.locator("output").inner_text() == after, "only with the button down"


# The step


def test_the_step_is_built_by_guessing_and_shows_what_was_measured(
    play: Callable[..., Any],
) -> None:
    page = play("step")
    runs = load("speed")
    runs = runs[runs["main"] & (runs["part"] == "levers") & (runs["outcome"] == "ok")]
    middle = runs.groupby("variant").median(numeric_only=True)
    reveal = page.get_by_role("button", name="Show what was measured")
    options = page.locator("[name=change] option")
    slowest = last = middle.loc["eager", "tokens_per_s"]
    for change in ("compiled blocks", "fused loss", "fused blocks", "fused optimizer"):
        assert options.locator(":scope:enabled").last.inner_text() == change, "one after the other"
        assert "How many tokens/s" in put(page, change=change)
        assert reveal.is_disabled() and noted(page, "guess") == "move it first"
        guess = float(page.locator("[name=guess]").input_value()) * slowest
        assert guess == pytest.approx(last, rel=0.01), "from what was measured, no guess left over"
        put(page, guess=1.1)
        reveal.click()
        told = page.locator(".answer").inner_text()
        assert told.startswith(("Right", "Your guess was")) and "tokens/s (" in told
        last = float(re.findall(r"([\d,]+) tokens/s \(", told)[0].replace(",", ""))
    hidden = put(page, change="fp8 matmuls")
    assert "How many tokens/s" in hidden and page.locator("text=fp8 matmuls: ?").count() == 1
    put(page, guess=1.2)
    reveal.click()
    said = page.locator(".answer").inner_text()
    assert "in the mean you were" in said
    row = middle.loc["fp8"]
    off = 1.2 * middle.loc["eager", "tokens_per_s"] / row["tokens_per_s"] - 1
    assert numbers(said)[0] == pytest.approx(-100 * off, abs=1) and "too low" in said
    shown = {each[0]: each[1:] for each in listed(page)}
    assert len(shown) == 6
    for variant, name in (
        ("eager", "eager"),
        ("fused_optimizer", "fused optimizer"),
        ("fp8", "fp8 matmuls"),
    ):
        step, speed, clock, watts, energy, peak = map(float, shown[name][:6])
        row = middle.loc[variant]
        assert step == pytest.approx(row["step_ms"], rel=1e-3)
        assert speed == pytest.approx(row["tokens_per_s"], rel=1e-3)
        assert (clock, watts) == pytest.approx((row["gpu_clock_mhz"], row["gpu_power_w"]), rel=1e-3)
        assert energy == pytest.approx(1e3 * row["gpu_power_w"] / row["tokens_per_s"], rel=2e-3)
        assert peak == pytest.approx(row["mem_peak_allocated_gib"], abs=0.01)
        *classes, loss = map(float, shown[name][6:])
        assert sum(classes) == pytest.approx(row["step_ms"], abs=0.05)
        losses = runs[runs["variant"] == variant]["validation_loss"]
        assert loss == pytest.approx(losses.mean(), abs=0.001), "what a gain of speed may cost"
    said = put(page, change="compiled blocks")
    peak = middle.loc["compiled", "mem_peak_allocated_gib"]
    assert numbers(said.split("peak ")[1])[0] == round(peak, 1)
    page.get_by_role("button", name="Guess again from the start").click()
    assert "compiled blocks: " in page.locator(".answer").inner_text() and reveal.is_disabled()


# Rounding


@pytest.mark.parametrize(
    ("weight", "power", "steps"), [(1, -10, 100), (0.05, -14.025, 100), (2, -7, 400)]
)
def test_weights_are_rounded_as_the_package_rounds(
    play: Callable[..., Any], weight: float, power: float, steps: int
) -> None:
    page = play("rounding")
    put(page, weight=weight, update=power, steps=steps)
    update = float(f"{2**power:.2g}")
    nearest, random = torch.tensor([weight]).bfloat16().float(), torch.full((8,), weight)
    random = random.bfloat16().float()
    for step in range(1, steps + 1):
        nearest = rounded(nearest + update, None).float()
        random = rounded(random + update, Noise(0, step, 0)).float()
    exact, to_nearest, *others = (float(row[1]) for row in listed(page))
    assert exact == pytest.approx(weight + steps * update)
    assert to_nearest == nearest.item() and others == random.tolist()
    page.get_by_role("button", name="Again").click()
    exact, to_nearest, *again = (float(row[1]) for row in listed(page))
    assert to_nearest == nearest.item() and again != others, "other random bits"
    assert page.locator("circle").count() == len(others), "each of the weights is seen"


@pytest.mark.parametrize("name", ["E4M3", "E5M2"])
def test_numbers_are_stored_as_pytorch_stores_them(play: Callable[..., Any], name: str) -> None:
    page, dtype = play("numbers"), {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}[name]
    largest = torch.finfo(dtype).max
    for scaled in (True, False):
        for value, top in ((-3.32, 1.26), (-13.02, 3.96), (1.98, 2.01), (9.88, 9.91)):
            put(page, format=name, largest=top)
            put(page, value=value, scaled=scaled)
            shown = {row[0]: row[1] for row in listed(page)}
            there = torch.tensor(float(shown["scaled"]))
            most = 2**top
            scale = largest / (round(most) if top > 6 else float(f"{most:.2g}")) if scaled else 1
            assert float(shown["scale"]) == pytest.approx(scale)
            stored = there.clamp(max=largest).to(dtype).float().item()
            assert float(shown["stored"]) == stored, (value, top)
    said = put(page, format="E4M3", value=9.88, scaled=False)
    assert said == "E4M3 clips 942 to 448: 52% off."
    put(page, largest=-1.04, value=-2.02)
    put(page, largest=-3.04)
    assert page.locator("[name=value]").input_value() == "-3.07", "none is above the largest"
    assert noted(page, "value") == "at most the largest value"


def test_the_examples_of_the_text_are_shown_first(play: Callable[..., Any]) -> None:
    said = play("rounding").locator(".answer").inner_text()
    assert "never moves: the update, 0.00006, is 0.25 times the distance" in said
    assert said.endswith("exact is 0.056.")
    said = play("numbers").locator(".answer").inner_text()
    assert said.startswith("0.001 times the scale 448 / 2.4 = 186.7 is 0.1867. E4M3 stores")


def test_what_is_shown_first_asks_or_tells_something(play: Callable[..., Any]) -> None:
    step = play("step")
    assert "How many tokens/s" in step.locator(".answer").inner_text()
    assert step.get_by_role("button", name="Show what was measured").is_visible()
    assert "1 of 4 GPUs waits" in play("ring").locator(".answer").inner_text()
    bare = put(play("numbers"), scaled=False)
    assert bare == "E4M3 stores 0.001 as 0.001953: 95% off."


# All of them


def test_a_color_has_one_meaning_and_one_declaration(play: Callable[..., Any]) -> None:
    """The scripts name meanings; the colors of legends are those of the charts."""
    for path in (*FOLDER.glob("*.js"), FOLDER / "explore.css"):
        named = {*re.findall(r"#[0-9A-Fa-f]{6}\b", path.read_text())}
        assert not {color.lower() for color in named} & {color.lower() for color in PALETTE}
    assert {*PARTS, "unused reserve"} == {*MEMORY_COLORS} and {*KERNEL_CLASSES} <= {*KERNEL_COLORS}
    memory = play("memory")
    put(memory, gpus=4)
    for page in (memory, play("step"), play("fits")):
        shown = page.locator(".legend span").evaluate_all(
            "all => all.map((e) => [e.textContent, getComputedStyle(e.firstChild).backgroundColor])"
        )
        assert len(shown) >= 5
        for name, color in shown:
            red, green, blue = map(int, re.findall(r"\d+", color))
            known = COLORS[re.sub(r" [\d.]+$", "", name)]
            assert known.lower() == f"#{red:02x}{green:02x}{blue:02x}", name


def luminance(color: str) -> float:
    """WCAG's relative luminance of `#rrggbb`."""
    shares = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colors_are_seen_on_a_dark_page(play: Callable[..., Any]) -> None:
    page = brand_colors(CHECKOUT / "reports")["background"]["dark"]
    for color in {*PALETTE, *COLORS.values()}:
        shown = luminance(ON_DARK.get(color, color))
        assert (shown + 0.05) / (luminance(page) + 0.05) >= 3, color
    legend = play("rounding", color_scheme="dark").locator(".legend i").nth(1)
    red, green, blue = (int(ON_DARK[COLORS["bad"]][at : at + 2], 16) for at in (1, 3, 5))
    drawn = legend.evaluate("e => getComputedStyle(e).backgroundColor")
    assert drawn == f"rgb({red}, {green}, {blue})"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [390, 800, 1400])
def test_an_explorable_stays_inside_its_window_and_is_quick(
    play: Callable[..., Any], name: str, width: int
) -> None:
    began = time.monotonic()
    page = play(name, width)
    page.locator(".explore form").first.wait_for()
    took = time.monotonic() - began
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for each in page.locator(".explore svg, .explore .bar").all():
        box = each.bounding_box()
        assert box is None or box["x"] + box["width"] <= width + 1
    for summary in page.locator(".explore summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert all(page.locator("svg[role=img]").evaluate_all("all => all.map((e) => e.ariaLabel)"))
    assert listed(page), "the values in text"
    update = """() => {
        const begin = performance.now();
        document.querySelector("form").oninput();
        return performance.now() - begin;
    }"""
    times = sorted(page.evaluate(update) for _ in range(5))
    assert times[0] < 100 and took < 10, (times, took)  # ms, s: a busy machine starts slowly


@pytest.mark.parametrize("name", NAMES)
def test_an_explorable_is_worked_by_keyboard_over_http(
    pages: Path,
    browser: Any,  # noqa: F811
    name: str,
) -> None:
    handler = functools.partial(_Quiet, directory=str(pages))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page, complaints = browser.new_page(), []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    try:
        page.goto(f"http://127.0.0.1:{server.server_port}/{name}.html")
        slider = page.locator("input[type=range]:not(:disabled):visible").first
        before = page.locator(".explore").last.inner_text()
        seen = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            seen.add(page.evaluate("document.activeElement.name"))
        assert {
            *page.locator("form :is(input, select):visible:not(:disabled)").evaluate_all(
                "all => all.map((e) => e.name)"
            )
        } <= seen
        slider.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.locator(".explore").last.inner_text() != before or name == "rounding"
        assert slider.get_attribute("aria-valuetext")
    finally:
        page.close()
        server.shutdown()
        server.server_close()
    assert complaints == []


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def test_the_javascript_of_the_page_stays_small() -> None:
    reports = CHECKOUT / "reports"
    files = [*FOLDER.glob("*.js"), reports / "pages.js", reports / "book.js"]
    text = "\n".join(path.read_text() for path in files)
    lines = [line for line in text.splitlines() if re.match(r"\s*(?!//)\S", line)]
    assert len(lines) <= 900, len(lines)
    assert max(map(len, lines)) <= 130, max(lines, key=len)
    shipped = sum(len(page_script(name, None)) for name in NAMES) + len(files[-1].read_bytes())
    assert shipped <= 150_000, shipped


def test_data_of_a_page_is_text() -> None:
    """Words of a record that want to be code, or the end of a script, stay words."""
    hostile = {"steps": "</script><script>alert(1)</script>\u2028`${alert(1)}`\\\"'"}
    script = page_script("step", hostile)
    held = re.search(r"onPage\(\"step\", draw, JSON.parse\((.*)\)\);\n}", script)
    assert held and json.loads(json.loads(held[1])) == hostile


def test_an_unknown_explorable_is_refused() -> None:
    with pytest.raises(UserError, match="there is no explorable 'rouding'"):
        module_of("rouding")


def test_every_explorable_is_a_picture_where_nothing_else_is() -> None:
    for name in NAMES:
        module = module_of(name)
        assert module.picture(module.data()).axes and module.TITLE


@pytest.fixture
def explored(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """What `lab.explore` shows in a notebook, by MIME type."""
    from lsai_lab.report.explore.show import explore

    shown: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))

    def explored(name: str) -> dict[str, Any]:
        explore(name)
        return shown[-1]

    return explored


def test_without_anywidget_it_is_a_picture_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
    explored: Callable[[str], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    bundle = explored("rounding")
    assert "<svg" in bundle["image/svg+xml"] and "weight in bf16" in bundle["text/plain"]
    assert "install anywidget" in capsys.readouterr().err
    assert not any("widget" in mime for mime in bundle)


def test_a_widget_holds_the_same_module_and_answers_questions(
    explored: Callable[[str], dict[str, Any]],
) -> None:
    pytest.importorskip("anywidget", reason="anywidget is not installed (the extra 'lab')")
    bundle = explored("memory")
    assert "application/vnd.jupyter.widget-view+json" in bundle and "image/png" in bundle
    asked = {"model": "llama3.2-1b", "states": "bf16", "checkpoint": "none", "gpus": 1}
    row = module_of("memory").answer(asked | {"fused": True, "tokens": 1536})
    found = predict(config_of("llama3.2-1b", tokens=1536))
    assert row["needs"] == pytest.approx(found.needs, abs=0.006)
    assert "error" in module_of("memory").answer(asked | {"fused": True, "tokens": 0})
