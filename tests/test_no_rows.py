"""A mistyped value in a filter is named by whatever the empty frame is given to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

import lsai_lab as lab
from lsai_core.base.errors import UserError

Filter = Callable[[Any], pd.DataFrame]
MISTYPED: dict[str, tuple[Filter, str]] = {
    "query": (lambda r: r.query("machine == 'H100'"), "machine 'H100'; did you mean h100?"),
    "and": (
        lambda r: r.query("part == 'train' and variant == 'bf61'"),
        "variant 'bf61'; did you mean bf16?",
    ),
    "mask": (lambda r: r[r.variant == "bf61"], "variant 'bf61'; did you mean bf16?"),
    "both": (
        lambda r: r[(r.part == "train") & (r.variant == "bf61")],
        "variant 'bf61'; did you mean bf16?",
    ),
    "loc": (lambda r: r.loc[r.machine == "H100"], "machine 'H100'; did you mean h100?"),
    "number": (lambda r: r[r["seq_len"] == "512"], "seq_len '512': it is a number, without quotes"),
    "other": (lambda r: r.query("batch_size == 77"), "batch_size 77; known: 32"),
}


@pytest.mark.parametrize("way", MISTYPED)
def test_a_mistyped_value_is_named_through_the_whole_chain(way: str) -> None:
    choose, said = MISTYPED[way]
    none = choose(lab.recorded("memory"))
    words = f"no rows: no row has {said}"
    assert repr(none) == words
    rows = lab.summarize(none, "tokens_per_s")
    assert repr(rows) == words and len(rows) == 0
    assert repr(lab.table(none)) == repr(lab.table(rows)) == words
    for frame in (none, rows):
        with pytest.raises(UserError) as error:
            lab.bars(frame, "label", "tokens_per_s")
        assert str(error.value) == f"nothing to draw: {words}"


def test_a_filter_of_values_that_exist_says_what_there_is() -> None:
    runs = lab.recorded("memory")
    none = runs[runs["tokens_per_s"] > 1e12]
    assert repr(none).startswith("no rows: none of 99 is as asked for; there study is memory;")
    assert "machine is h100, h200, h200-d" in repr(lab.summarize(none, "tokens_per_s"))
    some = runs[(runs.machine == "H100") | (runs.machine == "h200")]
    assert len(some) == len(runs.query("machine == 'h200'")) > 0
    assert "no row" not in repr(some)


def test_an_empty_frame_without_a_reason_draws_nothing() -> None:
    with pytest.raises(UserError, match="nothing to draw: the frame has no rows"):
        lab.bars(pd.DataFrame(columns=["a", "b"]), "a", "b")
    assert repr(lab.table(pd.DataFrame(columns=["a", "b"]))).startswith("| a | b |")
