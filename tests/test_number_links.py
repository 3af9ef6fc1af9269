"""Where the numbers of the book lead: one that compares to both of its runs, whose records come to
what is printed; one of a single run to that run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import pytest
from conftest import CHECKOUT, Project

import lsai_lab as lab
from lsai_lab.claims.declared import load_claims
from lsai_lab.report.numbers import Number, collected
from lsai_lab.runs.pages import page_name

# Numbers that two runs come to, by the result that they compare.
COMPARED = {
    "validation_loss": "nearest_cost fresh_cost advised_loss fp8_small early_low fresh_delayed "
    "validation advised_change early_0 short_nearest long_nearest fresh_nearest fresh_stochastic "
    "matrices_cost output_cost norms_cost embedding_cost small_embedding small_rate cure_left "
    "chance_cost fp8_billion",
    "tokens_per_s": "whole_gain fp8_gain advised_gain flash_speed all_speed bf16_speed all_h200 "
    "fp8_h200 fp8_h100 kernel_h200 job_fused job_fp8 job_gain gain_h100 gain_h200 zero2_slower "
    "fsdp_slower tp_slower cp_slower two_faster two_fsdp_slower long_cp_slower long_tp_slower "
    "fsdp_lead tp_lead fsdp_over_tp pipeline_slower regather",
    "tokens_per_s_per_gpu": "sharded_speed four_speed two_speed fp8_lead",
    "mem_peak_reserved_gib": "memory_saved fsdp_memory zero2_memory long_memory fsdp_more tp_more",
    "mem_peak_allocated_gib": "checkpointed both_share fused_saved tensorwise_saved te_more",
    "step_ms": "optimizer_saved fp8_saved step_slowest",
    "kernel_attention_ms": "attention_slowest attention_longer",
    "kernel_matmul_ms": "matmul_longer",
    "largest_batch": "largest_gain",
    "parameters": "four_times",
    "training_loss": "long_training",
    "copy_gb_per_s": "memory_ratio",
    "matmul_bf16_tflops": "arithmetic_apart",
}
# Two runs, and more than one result of each: ends of intervals, losses by pass, classes of kernels.
FROM_MORE = (
    "energy_saved fp8_large rounded_range joint joint_training loss_spread long_first long_sixth "
    "large_fourth optimizer_seen kept fp8_share fp8_gaps fp8_less pays_step "
    "fp8_over_bf16"
)
# One run, and no plain result of it: shares of it, rates of a bench, what was predicted for it.
FROM_ONE = (
    "balance_h100 balance_h200 eager_reached norm_least tokens_bf16 tokens_fp8 gaps_least "
    "gaps_most auto_neighbour auto_order auto_table longest_share accumulate_ms attention_share "
    "bf16_ideal first_fused first_later fp8_halved fp8_ideal fp8_peak_share most_alone of_peak "
    "optimizer_rate optimizer_share tenth_ms fixed alone with_casts rowwise share "
    "lost_first lost_last offload_share interleaved_off long_cp_said pipeline_off "
    "two_speed_off waited_measured node_busy node_hidden time_off"
)
SCALES = (1, 100, 1e-3, 1e-6, 1e-9)


@pytest.fixture(scope="module")
def recorded() -> pd.DataFrame:
    return lab.recorded().assign(page=lambda rows: rows["run"].map(page_name))


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Number]:
    """Every number of the book that is a link."""
    folder = str(tmp_path_factory.mktemp("none"))
    code, out, err = Project(CHECKOUT, {"LSAI_RUNS": folder, "LSAI_DATA": folder}).lsai("numbers")
    assert code == 0, (out, err)
    found = {}
    for path in sorted((CHECKOUT / "notebooks").glob("[0-9]*.ipynb")):
        executed = CHECKOUT / "reports" / "_build" / path.name
        computed = collected(nbformat.read(executed, as_version=4))
        found |= {f"{path.stem} {name}": each for name, each in computed.items() if each.run}
    return found


def size_of(text: str) -> tuple[float, float]:
    """The size of a printed number, and how far rounding may have moved it."""
    found = re.search(r"\d[\d,]*(?:\.(\d+))?", text)
    assert found, text
    share = 100 if "%" in text else 1
    step = 10.0 ** -len(found[1] or "")
    return float(found[0].replace(",", "")) / share, 0.501 * step / share


def repeats_of(recorded: pd.DataFrame, page: str) -> pd.DataFrame:
    """The good runs that are repeats of one."""
    run = recorded[recorded["page"] == page].iloc[0]
    same = [recorded[name] == run[name] for name in ("machine", "study", "part", "variant")]
    rows = recorded[np.logical_and.reduce(same) & (recorded["outcome"] == "ok")]
    return rows.sort_values("started").drop_duplicates("repeat", keep="last").set_index("repeat")


def by_repeat(recorded: pd.DataFrame, page: str, result: str) -> pd.Series:
    rows = repeats_of(recorded, page)
    values = lab.training_loss(rows) if result == "training_loss" else rows[result]
    return pd.to_numeric(values).dropna().sort_index()


def changes(before: Any, after: Any) -> Iterator[Any]:
    yield from (after - before, after / before, before / after)
    yield from (after / before - 1, before / after - 1)


@pytest.mark.slow
def test_a_comparison_leads_to_two_runs_that_come_to_the_printed_number(
    numbers: dict[str, Number], recorded: pd.DataFrame
) -> None:
    result_of = {name: result for result, names in COMPARED.items() for name in names.split()}
    two = {name: number for name, number in numbers.items() if "," in number.run}
    assert {name.split()[1] for name in two} == {*result_of, *FROM_MORE.split()}
    for name, number in two.items():
        if (result := result_of.get(name.split()[1])) is None:
            continue
        before, after = (by_repeat(recorded, page, result) for page in number.run.split(","))
        repeats = before.index.intersection(after.index)
        size, near = size_of(number)
        assert any(
            np.min(np.abs(each)) - near <= size <= np.max(np.abs(each)) + near
            for each in changes(before[repeats].to_numpy(), after[repeats].to_numpy())
        ), (name, number, number.run, result)


@pytest.mark.slow
def test_a_number_of_one_run_stands_in_its_record(
    numbers: dict[str, Number], recorded: pd.DataFrame
) -> None:
    rest = set()
    for name, number in numbers.items():
        if "," in number.run:
            continue
        rows = repeats_of(recorded, number.run).select_dtypes("number").abs()
        size, near = size_of(number)
        low, high = (np.outer(SCALES, ends) for ends in (rows.min(), rows.max()))
        if not ((low - near <= size) & (size <= high + near)).any():
            rest.add(name.split()[1])
    assert rest <= {*FROM_ONE.split()}, "a share, a difference or a ratio: of which runs?"
    for name, step in (("lost_first", 185), ("lost_last", 1665)):
        number = numbers[f"35-states {name}"]
        lost = lab.lost_updates(repeats_of(recorded, number.run).reset_index())
        share = lost.query(f"step == {step} and `class` == 'matrices'")["share"].mean()
        assert f"{share:.0%}" == number


def test_a_claim_leads_to_the_first_runs_that_it_compares(recorded: pd.DataFrame) -> None:
    declared, claims = load_claims(), lab.judged()
    compared = [name for name, run in claims["run"].items() if isinstance(run, tuple)]
    assert len(compared) > 60
    for name, row in claims.iterrows():
        claim = declared[str(name)]
        ends = row["run"] if isinstance(row["run"], tuple) else (row["run"],)
        if row["run"] is None:
            assert not row["runs"]
            continue
        assert {*ends} <= {*row["runs"]}
        one_bench = claim.over is not None and len({*row["runs"]}) == 1
        assert len(ends) == (1 if claim.over is None or one_bench else 2), name
        if len(ends) == 2 and claim.kind in ("ratio", "interval", "relative_interval"):
            assert comes_to(recorded, claim, row, *map(page_name, map(Path, ends))), name


def comes_to(recorded: pd.DataFrame, claim: Any, row: Any, before: str, after: str) -> bool:
    """Whether the repeats of two runs come to what was measured of a claim."""
    assert claim.over is not None
    for result, base in itertools.product(claim.of.metric, claim.over.metric):
        old, new = by_repeat(recorded, before, base), by_repeat(recorded, after, result)
        if claim.kind == "ratio":
            found = lab.over_repeats(result, new) / lab.over_repeats(base, old)
            if found == pytest.approx(row["value"], rel=1e-5):
                return True
            continue
        apart = (new / old - 1 if claim.kind == "relative_interval" else new - old).mean()
        # one seed has no interval
        middle = (row["low"] + row["high"]) / 2 if row["n"] > 1 else np.sign(apart) * row["value"]
        if apart == pytest.approx(middle, abs=1e-5):
            return True
    return False
