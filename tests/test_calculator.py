"""Twelve questions of somebody who is new to it, each answered by the report's calculator where it
stands, and the answers held against the package's predictions.

 1 Can one H100 train Llama-3-8B over 8,192 tokens, and how?
 2 Does it fit an RTX 4090 at all?
 3 How many H100s does the 70 B model need?
 4 What is the longest sequence that fits one H100?
 5 What does full checkpointing save, and what does it cost?
 6 Does it fit with fp32 states?
 7 What do 8-bit states save?
 8 How many sequences of 4,096 tokens fit one H200?
 9 How long do ten billion tokens take on up to eight H100s?
10 Which takes fewer GPU-hours, the fewest GPUs or the fastest?
11 Does a model of my own fit 24 GB?
12 What takes the memory?
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CHECKOUT
from test_book import browser, templates, visit  # noqa: F401
from test_explore import listed, noted, numbers, put

from lsai_core.prediction.memory import predict, usable_gib
from lsai_core.prediction.roofline import estimate
from lsai_core.profiling.gpus import find_gpu
from lsai_lab.predictions.steps import config_of
from lsai_lab.report.explore.fits import _SHAPE, OWN_SHAPES_WITHIN
from lsai_lab.report.runpages import write_run_pages

TABLES = Path("reports") / "recorded" / "predictions"


@pytest.fixture(scope="module")
def fits_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of what fits, as the report has it."""
    root = tmp_path_factory.mktemp("fits")
    reports = templates(root / "reports")
    (root / TABLES).mkdir(parents=True)
    for name in ("fits.csv", "steps.jsonl"):
        (root / TABLES / name).write_bytes((CHECKOUT / TABLES / name).read_bytes())
    write_run_pages([], reports)
    return reports / "runs" / "fits.html"


@pytest.fixture
def page(fits_page: Path, visit: Callable[..., Any]) -> Any:  # noqa: F811
    return visit(fits_page, 1400)


def rows(page: Any) -> dict[str, dict[str, Any]]:
    """Of each technique the verdict, GiB, tokens/s in all and of a GPU, time, and room."""
    found = page.locator(".rows:has(.bar) tbody tr").evaluate_all(
        "rows => rows.map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    names = ("verdict", "gib", "all", "each", "time", "room")
    return {row[0].split("\n")[0]: dict(zip(names, row[2:], strict=True)) for row in found}


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_1_one_gpu_is_enough_and_with_what(page: Any) -> None:
    said, found = put(page, gpu="H100", tokens=13), rows(page)
    best = next(iter(found))
    assert said.startswith(f"One H100 is enough: {best}, {found[best]['gib']} of 79.1 GiB")
    fitting = {}
    for checkpoint in ("none", "selective", "full"):
        config = config_of("llama3-8b", checkpoint=checkpoint)
        needs = predict(config).needs
        name = f"{checkpoint.replace('none', 'no')} checkpointing"
        verdict = found[name]["verdict"]
        assert (verdict == "fits") == (needs <= usable_gib(find_gpu("H100"))), name
        assert float(found[name]["gib"]) == pytest.approx(needs, abs=0.06), name
        time = estimate(config, find_gpu("H100"))
        assert time is not None
        assert number(found[name]["each"]) == pytest.approx(time.tokens_per_s, rel=0.01)
        if verdict == "fits":
            fitting[name] = time.tokens_per_s
    assert best == max(fitting, key=fitting.__getitem__)
    advised = re.findall(r"With fp8 matmuls: (.+), ([\d.]+) GiB, ([\d,]+) tokens/s\.", said)[0]
    put(page, products="fp8")
    fastest, row = next(iter(rows(page).items()))
    assert advised == (fastest, row["gib"], row["all"]) and number(row["all"]) > max(
        fitting.values()
    )


def test_2_a_small_gpu_and_the_host(page: Any) -> None:
    said = put(page, gpu="RTX 4090")
    assert said.startswith("One RTX 4090 is enough: full checkpointing, CPU offload")
    host = predict(config_of("llama3-8b", checkpoint="full", offload=True)).host
    assert f"needs {host:.1f} GiB of the host's memory, too: check that yours has it." in said


def test_3_how_many_for_70_b(page: Any) -> None:
    put(page, products="fp8")
    said = put(page, model="llama3-70b")
    assert said.startswith("8,192 tokens a GPU do not fit on up to 2 H100s. The nearest is"), said
    products, gpus = page.locator("[name=products]"), page.locator("[name=gpus]")
    assert products.is_disabled() and products.input_value() == "bf16", "no dead end"
    said = noted(page, "products")
    assert said.startswith("fp8 was predicted only for up to 8 B parameters with bf16 states")
    assert noted(page, "gpus") == "at least 2: weights and gradients alone take 263 GiB"
    assert gpus.locator("option:disabled").all_inner_texts() == ["1"]
    put(page, model="llama3-8b")
    assert gpus.input_value() == "1", "what the reader chose"
    assert noted(page, "gpus") is None and gpus.locator("option:disabled").count() == 0
    put(page, model="llama3-70b", gpus=8)
    put(page, model="llama3-8b")
    assert gpus.input_value() == "8", "chosen for the large model"
    said = put(page, model="llama3-70b", gpu="H100", gpus=64, order="fewest")
    found = re.match(r"The fewest H100s that fit are (\d+): full checkpointing, FSDP", said)
    assert found, said
    fewest = int(found[1])
    config = config_of("llama3-70b", checkpoint="full", gpus=16)
    assert fewest == 16 and predict(config).needs <= usable_gib(find_gpu("H100"))
    kinds = {row[0]: row[2] for row in table(page)}
    assert kinds["H100"] == "16" and kinds["RTX 4090"] == "none" and int(kinds["H200"]) <= 8


def test_a_slow_way_that_fits_names_what_takes_less_gpu_time(page: Any) -> None:
    said = put(page, gpu="H100", gpus=64, states="fp32", tokens=13)
    assert said.startswith("One H100 is enough: full checkpointing, CPU offload"), said
    faster, count = re.findall(r"Less GPU time: (.+) on (\d+) H100s, in ", said)[0]
    found = rows(page)
    assert found[faster]["verdict"] == "fits"
    slow = number(next(iter(found.values()))["all"])
    assert number(found[faster]["all"]) > 2 * int(count) * slow
    assert found[faster]["time"] in said
    assert "Less GPU time" not in put(page, states="bf16"), "each is as fast alone"


def table(page: Any) -> list[list[str]]:
    return list(
        page.locator(".rows:not(:has(.bar)) tbody tr").evaluate_all(
            "rows => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
    )


def test_4_the_longest_sequence(page: Any) -> None:
    put(page, gpu="H100")
    room = int(number(rows(page)["full checkpointing"]["room"]))
    usable = usable_gib(find_gpu("H100"))
    needed = [
        predict(config_of("llama3-8b", checkpoint="full", tokens=tokens)).needs
        for tokens in (round(0.9 * room / 512) * 512, round(1.1 * room / 512) * 512)
    ]
    assert needed[0] <= usable < needed[1]


def test_5_what_checkpointing_saves_and_costs(page: Any) -> None:
    put(page, gpu="H200")
    found = rows(page)
    none, full = found["no checkpointing"], found["full checkpointing"]
    assert float(none["gib"]) - float(full["gib"]) > 10 and number(full["each"]) < number(
        none["each"]
    )
    put(page, gpu="H200", tokens=14)


def test_6_and_7_states_are_chosen(page: Any) -> None:
    for states in ("fp32", "8-bit"):
        put(page, gpu="H200", states=states)
        needs = predict(config_of("llama3-8b", states, checkpoint="full")).needs
        shown = float(rows(page)["full checkpointing"]["gib"])
        assert shown == pytest.approx(needs, abs=0.06 if needs < 100 else 0.51)
        assert page.locator("[name=products]").is_disabled(), "fp8 was predicted for bf16 states"


def test_8_the_largest_batch(page: Any) -> None:
    said = put(page, gpu="H200", tokens=12)
    best = next(iter(rows(page)))
    sequences = int(numbers(said.split("tokens a GPU, ")[1])[0])
    assert sequences == int(number(rows(page)[best]["room"])) // 4096 and sequences > 4
    said = put(page, gpu="H200", tokens=12, batch=sequences)
    assert rows(page)[best]["verdict"] == "fits"


def test_9_and_10_time_in_all_and_gpu_hours(page: Any) -> None:
    shown = {}
    for order in ("fewest", "shortest"):
        said = put(page, gpu="H100", gpus=8, train=10, order=order)
        best = next(iter(rows(page)))
        row = rows(page)[best]
        gpus = int((re.findall(r"FSDP over (\d+)", best) or [1])[0])
        hours = 10e9 / number(row["all"]) / 3600
        told = re.search(r"10 billion tokens take ([\d.,]+) (hours|days)", said)
        estimated = "The speed of several GPUs is estimated: as one among 4, with messages."
        assert (estimated in said) == (gpus > 1)
        assert told and number(told[1]) * (24 if told[2] == "days" else 1) == pytest.approx(
            hours, rel=0.01
        )
        if gpus > 1:
            assert number(re.search(r"([\d,]+) GPU-hours", said)[1]) == pytest.approx(
                hours * gpus, rel=0.01
            )  # type: ignore[index]
        assert number(row["all"]) == pytest.approx(gpus * number(row["each"]), rel=0.001)
        shown[order] = (gpus, hours)
    assert shown["fewest"][0] == 1 and shown["shortest"][0] == 8
    assert shown["shortest"][1] < shown["fewest"][1] / 6


SHAPES = {
    "small": (12, 768, 12, 12, 2048, 50304),
    "middle": (26, 2560, 20, 5, 6912, 65536),
    "wide vocabulary": (28, 3584, 28, 4, 18944, 152064),
}


@pytest.mark.parametrize("name", SHAPES)
def test_11_a_model_of_my_own(page: Any, name: str) -> None:
    fields = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab_size")
    shape = dict(zip(fields, SHAPES[name], strict=True))
    assert not page.locator("[name=d_model]").is_visible()
    put(page, model="a model of your own", gpu="RTX 4090", **shape)
    for checkpoint in ("none", "full"):
        needs = predict(config_of(shape, checkpoint=checkpoint)).needs
        shown = rows(page)[f"{checkpoint.replace('none', 'no')} checkpointing"]
        assert float(shown["gib"]) == pytest.approx(needs, rel=OWN_SHAPES_WITHIN, abs=0.3)
    time = estimate(config_of(shape), find_gpu("H100"))
    put(page, gpu="H100")
    assert time is not None
    assert number(rows(page)["no checkpointing"]["each"]) == pytest.approx(
        time.tokens_per_s, rel=0.35
    )


def test_no_gpu_of_several_is_faster_than_one_alone(page: Any) -> None:
    """Beyond a node no network was measured: no speed is given there."""
    for products in ("bf16", "fp8"):
        put(page, gpu="H100", gpus=64, products=products)
        found = rows(page)
        compared = 0
        for name, row in found.items():
            alone, _, shared = name.partition(", FSDP over ")
            gpus = int((re.findall(r"\d+", shared) or [1])[0])
            assert (row["each"] == row["all"] == "–") == (gpus > 8), name
            if 1 < gpus <= 8:
                compared += 1
                assert number(row["each"]) <= 1.001 * number(found[alone]["each"]), name
        assert compared >= 4
    said = put(page, products="bf16", order="fewest")
    said = put(page, model="llama3-70b")
    assert "Its speed over more than one node of 8 was not measured." in said


def test_a_gpu_without_fp8_is_no_matter_of_their_number(page: Any) -> None:
    put(page, gpu="H100", products="fp8")
    kinds = {row[0]: row[2:4] for row in table(page)}
    assert kinds["A100-80"] == ["none", "no fp8 matmuls"] and kinds["H100"][0].isdigit()


def test_words_of_what_is_estimated_changed_or_short(page: Any) -> None:
    assert "The speed is estimated from the data sheet." in put(page, gpu="A100-80")
    said = put(page, gpu="H100", gpus=8, products="fp8", order="shortest", tokens=13)
    assert "data sheet" not in said and re.search(r"take [\d.]+ hours, or [\d.]+ GPU-hours", said)
    assert re.search(r"tokens take [\d.]+ minutes", put(page, train=0.1)), "not 0.2 hours"
    sentences = re.split(r"[.:] ", said.replace("H100", "GPU"))
    assert max(len(numbers(each)) for each in sentences) <= 4, said
    refused = "No prediction. Change “tokens to train (billions)”: more than 0."
    for train in ("-5", "0", ""):
        assert put(page, train=train) == refused and noted(page, "train") == "more than 0"
        assert page.locator(".rows").count() == 0
    assert put(page, train=1, model="a model of your own", products="bf16") != refused
    for name, label in _SHAPE.items():
        refused = f"No prediction. Change “{label}”: a whole number from 1."
        usual = page.locator(f"[name={name}]").input_value()
        for value in ("0", "", "-4", "1.5"):
            assert put(page, **{name: value}) == refused
            assert noted(page, name) == "a whole number from 1"
        assert put(page, **{name: usual}) != refused
    refused = "No prediction. Change “heads”: twice their number must divide the width."
    assert put(page, n_heads=33) == refused
    assert noted(page, "n_heads") == "twice their number must divide the width"
    refused = "No prediction. Change “key-value heads”: their number must divide the heads."
    assert put(page, n_heads=32, n_kv_heads=7) == refused
    assert noted(page, "n_kv_heads") == "their number must divide the heads"
    put(page, n_kv_heads=8, tokens=12, batch=32)
    assert noted(page, "batch") is None
    put(page, tokens=16)
    assert page.locator("[name=batch]").input_value() == "2"
    assert noted(page, "batch") == "at most 131,072 tokens a GPU"
    put(page, states="8-bit")
    assert "only for up to 8 B parameters with bf16 states" in str(noted(page, "products"))
    put(page, states="bf16", gpu="A100-80")
    assert noted(page, "products") == "the A100-80 has no fp8"


def test_what_decides_stands_first_and_the_rest_is_folded(page: Any) -> None:
    shown = page.locator("form > label:visible").evaluate_all(
        "all => all.map((e) => e.querySelector('[name]').name)"
    )
    assert shown == ["model", "gpu", "gpus", "tokens", "products"]
    assert not page.locator("[name=states]").is_visible()
    page.get_by_text("More settings").click()
    assert page.locator("[name=states]").is_visible()


def test_12_what_takes_the_memory(page: Any) -> None:
    put(page, gpu="H200")
    parts = predict(config_of("llama3-8b")).parts
    shown = {row[0]: float(row[1]) for row in listed(page)}
    for name, size in parts.items():
        assert shown.get(name, 0) == pytest.approx(size, abs=0.06), name
    row = page.locator(".rows tbody tr", has_text="full checkpointing").first
    row.focus()
    assert "full checkpointing" in page.locator(".legend b").inner_text()


def test_nothing_is_hidden_and_no_sentence_contradicts_itself(
    fits_page: Path,
    visit: Callable[..., Any],  # noqa: F811
) -> None:
    for width in (390, 800, 1400):
        page = visit(fits_page, width)
        said = put(page, gpu="RTX 4090", tokens=15)
        verdicts = page.locator(".rows td:is(.fits, .tight, .large)")
        assert verdicts.count() == 5 and all(each.is_visible() for each in verdicts.all())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        scrolling = """[...document.querySelectorAll(".explore, .explore *")].filter((node) =>
            node.scrollHeight > node.clientHeight + 2
            && ["auto", "scroll"].includes(getComputedStyle(node).overflowY)).length"""
        assert page.evaluate(scrolling) == 0
        put(page, gpu="A100-40", states="fp32", batch=4, tokens=15)
        said = page.locator(".answer").inner_text()
        if "do not fit" in said:
            assert "of 39.4 GiB on" not in said and "a run may use 37.6 of 39.4 GiB" in said
    assert page.locator(".bar span").count(), "a bar that is cut says so"


def test_between_its_predictions_it_says_nearly_what_is_predicted(page: Any) -> None:
    put(page, model="llama3.2-1b", gpu="H200", gpus=2, tokens=12.5, batch=3)
    found = rows(page)
    for checkpoint, gpus in (("none", 1), ("full", 1), ("full", 2)):
        config = config_of("llama3.2-1b", checkpoint=checkpoint, gpus=gpus, tokens=5888 * 3)
        name = f"{checkpoint.replace('none', 'no')} checkpointing" + f", FSDP over {gpus} GPUs" * (
            gpus > 1
        )
        assert float(found[name]["gib"]) == pytest.approx(predict(config).needs, rel=0.05), name
        several = config.model_copy(update={"seq_len": 5888, "batch_size": 3})
        time = estimate(several, find_gpu("H200"))
        assert time is not None
        each = time.tokens_per_s / gpus
        assert number(found[name]["each"]) == pytest.approx(each, rel=0.05), name


def test_the_choice_stands_in_the_address(fits_page: Path, visit: Callable[..., Any]) -> None:  # noqa: F811
    page = visit(fits_page)
    said = put(page, gpu="A100-80", tokens=12, batch=32, states="8-bit", order="cheapest")
    said = put(page, tokens=14)
    assert page.locator("[name=batch]").input_value() == "8", "cut at the longest prediction"
    again = visit(fits_page)
    again.goto(page.url)
    again.reload()
    assert again.locator(".answer").inner_text() == said
    assert again.locator("[name=states]").is_visible(), "what was changed is not folded"
    again.goto(page.url.split("#")[0] + "#model=nothing&gpu=none&tokens=x&batch=-3&states=<b>")
    again.reload()
    assert "of 79.1 GiB on one H100" in again.locator(".answer").inner_text()
