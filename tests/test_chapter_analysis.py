"""What the chapters on one GPU compute from records, on small frames whose results are known."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from conftest import CHECKOUT

import lsai_lab as lab
from lsai_core.config.model import ModelConfig
from lsai_core.config.strict import validated
from lsai_lab.analysis.attention import kernel_lead, window_times
from lsai_lab.analysis.roof import block_operations, least_times, tokens_to_fill
from lsai_lab.analysis.step_time import compile_pays, gain_range, levers, waterfall
from lsai_lab.analysis.summary import with_range
from lsai_lab.analysis.techniques import memory_terms
from lsai_lab.report.load import recorded
from lsai_lab.report.panels import letter


def lever(variant: str, repeat: int, tokens_per_s: float, kernel: str = "a") -> dict[str, object]:
    return {
        "variant": variant,
        "label": f"+ {variant}",
        "repeat": repeat,
        "outcome": "ok",
        "tokens_per_s": tokens_per_s,
        "step_ms": 1e6 / tokens_per_s,
        "gpu_power_w": 500.0,
        "batch_size": 1,
        "seq_len": 1000,
        "attention_kernel": kernel,
    }


def test_a_gain_is_real_if_ranges_do_not_meet_and_it_exceeds_the_noise() -> None:
    speeds = {"first": (100, 101, 102), "much": (110, 111, 112), "little": (111, 111.5, 113)}
    runs = [lever(name, n, speed) for name, of in speeds.items() for n, speed in enumerate(of)]
    runs += [lever("attention", n, 111.5) for n in range(3)]  # the same kernel: no change
    found = levers(pd.DataFrame(runs)).set_index("variant")
    assert list(found.index) == ["first", "much", "little"]
    assert list(found["real"]) == [False, True, False]
    assert found.loc["much", "gain"] == pytest.approx(111 / 101 - 1)
    assert gain_range(found.loc["much"].to_dict()) == "9.9 (7.8 to 12.0)"
    assert gain_range(found.loc["first"].to_dict()) is None
    assert found.loc["first", "mj_per_token"] == pytest.approx(500 * (1e6 / 101) / 1000)


def test_the_bars_lead_from_the_first_step_to_the_ideal_one() -> None:
    runs = recorded("speed").query("part == 'levers' and machine == 'h100'")
    bars = waterfall(levers(runs)).set_index("what")
    changes = bars[bars["kind"] == "change"]["moved_ms"].sum()
    left = bars[bars["kind"] == "left"]["moved_ms"].sum()
    assert bars.loc["eager", "to_ms"] + changes == pytest.approx(bars.loc["fp8 step", "to_ms"])
    assert bars.loc["fp8 step", "to_ms"] + left == pytest.approx(bars.loc["ideal step", "to_ms"])


def test_compiling_pays_when_the_later_start_is_made_up() -> None:
    columns = ["variant", "label", "repeat", "first_step_s", "step_ms"]
    rows = [("plain", "plain", 0, 1.0, 500.0), ("fast", "fast", 0, 11.0, 250.0)]
    rows += [("plain", "plain", 1, 1.2, 500.0), ("fast", "fast", 1, 6.0, 250.0)]
    pays = compile_pays(pd.DataFrame(rows, columns=columns), "plain")
    assert list(pays["step"]) == [41, 21]  # 10 s and 5 s, a quarter of a second a step


def test_a_kernel_leads_if_measurements_and_sessions_cannot_explain_it() -> None:
    columns = ["backend", "length", "ms", "ms_low", "ms_high"]
    rows = [("ours", 1, 10, 10, 10), ("other", 1, 12, 11, 13), ("third", 1, 20, 20, 20)]
    rows += [("ours", 2, 10, 9, 12), ("other", 2, 11, 10, 12)]
    rows += [("ours", 3, 10, 10, 10), ("other", 3, 8, 8, 8)]
    times = pd.DataFrame(rows, columns=columns)
    times = times.assign(**{"heads of": "heads of 64", "mask": "causal", "window": 0.0})
    lead = kernel_lead(times, "ours").set_index("length")
    assert list(lead["verdict"]) == ["faster", "tie", "slower"]
    assert lead.loc[1, "rival_backend"] == "other" and lead.loc[1, "lead"] == pytest.approx(1.2)
    narrow = times.query("length == 2").assign(mask="window", window=1.0, ms=[5.0, 5.5])
    windows = window_times(pd.concat([times, narrow]), "heads of 64", 2)
    assert list(windows["time"]) == [0.5, 0.5] and list(windows["pairs"]) == [0.75, 0.75]


def test_operations_and_terms_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    shape = validated(ModelConfig, {"preset": "course"}, "the model")
    rate = pd.Series(
        {"matmul_bf16_tflops": 700.0, "matmul_fp8_tflops": 1400.0, "copy_gb_per_s": 3500.0}
    )
    work = block_operations(shape, tokens=8192, length=4096)
    times = least_times(work, rate)
    assert times.loc["RMSNorm", "memory"] == pytest.approx(4 * 8192 * 4096 / 3500e9 * 1e6)
    up = 2 * 8192 * 4096 * 2 * 14336
    assert times.loc["gate and up", "arithmetic"] == pytest.approx(up / 700e12 * 1e6)
    tokens = tokens_to_fill(shape, rate, "bf16")
    few = least_times(block_operations(shape, round(tokens), 4096), rate).loc["gate and up"]
    assert few["arithmetic"] == pytest.approx(few["memory"], rel=0.01)
    row = {"batch_size": 32, "seq_len": 512, "parameters": 2**28, "model.n_layers": 6}
    row |= {"model.n_heads": 8, "model.d_model": 512, "model.vocab_size": 10000}
    terms = memory_terms(row)
    assert terms["weights, gradients, states"] == 4 and terms["scores"] == 1.5


def test_a_range_stands_in_brackets() -> None:
    rows = pd.DataFrame({"speed": [4.0], "speed_low": [3.0], "speed_high": [5.0]})
    assert list(with_range(rows, "speed", 2, "{:.1f}x")) == ["2.0x (1.5 to 2.5)"]


def test_panels_are_lettered_in_their_order_and_keep_their_titles() -> None:
    fig, (left, right) = plt.subplots(1, 2)
    left.set_title("host c")
    right.twinx()  # lies over a panel, and is none
    letter(fig)
    assert [axes.get_title(loc="left") for axes in fig.axes] == ["(a) host c", "(b)", ""]
    assert not left.get_title(), "once"
    alone, axes = plt.subplots()
    letter(alone)
    assert not axes.get_title(loc="left")
    plt.close("all")


def test_models_compiled_as_a_whole_count_among_the_programs_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    errors = lab.prediction_errors(lab.run_predictions())
    summary = lab.error_summary(errors).set_index(["what", "tested_on"])
    assert (
        summary.loc["active memory", "n"][["others' programs", "others' compiled models"]].sum()
        == 70
    )
    active = errors[errors["tested_on"].str.startswith("others'")].query("what == 'active memory'")
    assert (active["error"].abs() <= 0.03).sum() == 52, "by the first predictions"
