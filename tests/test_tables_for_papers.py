"""`lab.table` as text for papers and other programs."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd
import pytest

import lsai_lab as lab
from lsai_core.base.errors import UserError


def summary() -> pd.DataFrame:
    runs = lab.recorded("memory").query("part == 'train' and machine == 'h100'")
    return lab.summarize(runs, ["tokens_per_s", "validation_loss"])


def test_a_summary_is_a_table_with_its_ranges(empty: Path) -> None:
    table = lab.table(summary())
    head, _, *rows = str(table.to_markdown()).splitlines()
    assert head == "| machine | variant | label | n | disturbed | tokens_per_s | validation_loss |"
    assert rows[1] == (
        "| h100 | bf16 | bf16 autocast | 3 | 0 | 447,956 (447,806–449,552) "
        "| 4.1223 (4.1193–4.1261) |"
    )
    assert len(rows) == 8 and "Shown are" not in str(table.data)
    assert "447,956 (447,806–449,552)" in repr(table) and "](" in str(table.data), (
        "links stay there"
    )


def test_latex_can_be_compiled_and_says_the_same(empty: Path) -> None:
    text = str(lab.table(summary(), {"tokens_per_s": ",.0f"}).to_latex())
    assert r"tokens\_per\_s & validation\_loss \\" in text and r"\begin{tabular}{lllrrrr}" in text
    assert r"h100 & flash\_attn & flash attention & 3 & 0 & 676,727 (657,687--707,444)" in text
    assert "http" not in text and "](" not in text and "/memory/" not in text
    odd = pd.DataFrame({"a & b": ["50 % of $x", "c_d #1"], "n": [1.5, -2.25]})
    text = str(lab.table(odd).to_latex())
    assert (
        r"a \& b & n \\" in text and r"50 \% of \$x & 1.50" in text and r"c\_d \#1 & -2.25" in text
    )


def test_csv_has_all_digits_and_columns(empty: Path) -> None:
    rows = summary()
    read = pd.read_csv(io.StringIO(str(lab.table(rows).to_csv())))
    assert read["tokens_per_s"].tolist() == rows["tokens_per_s"].tolist()
    assert "tokens_per_s_low" in read and "run" not in read


def test_a_table_is_written_to_a_file(empty: Path, tmp_path: Path) -> None:
    table = lab.table(summary())
    for write in (table.to_csv, table.to_latex, table.to_markdown):
        assert write(tmp_path / "table") is None
        assert (tmp_path / "table").read_text(encoding="utf-8") == write()
    with pytest.raises(UserError, match="No such file"):
        table.to_csv(tmp_path / "none" / "table")


def test_ends_that_are_given_a_format_are_columns(empty: Path) -> None:
    rows = summary()[["label", "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"]]
    head = str(lab.table(rows).to_markdown()).splitlines()[0]
    assert head == "| label | tokens_per_s |"
    formats = dict.fromkeys(("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"), ",.0f")
    lines = str(lab.table(rows, formats).to_markdown()).splitlines()
    assert lines[2] == "| baseline (fp32) | 170,944 | 170,933 | 170,952 |"


def test_claims_are_read_again_only_when_a_file_changed(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lsai_core.base.disk_cache as disk_cache
    from lsai_lab.report import judged

    monkeypatch.setattr(disk_cache, "FOLDER", tmp_path / "cache")
    first = lab.judged("flash_speed", "same_quality")
    asked: list[int] = []
    monkeypatch.setattr(judged, "evaluate", lambda *given: asked.append(1) or 1 / 0)
    monkeypatch.setattr(judged.evaluate, "__module__", "lsai_lab.claims.evaluate", raising=False)
    pd.testing.assert_frame_equal(lab.judged("flash_speed", "same_quality"), first)
    assert not asked
    with pytest.raises(ZeroDivisionError):
        lab.judged("flash_speed")


def test_a_table_of_claims_shows_what_the_frame_shows(empty: Path) -> None:
    found = lab.table(lab.judged("flash_speed"))
    assert [*found.cells] == ["name", "machine", "bound", "verdict", "claim", "measured"]
    assert found.cells["name"].item() == "flash_speed"


def test_a_metric_that_was_asked_for_is_shown(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    rows = lab.summarize(lab.recorded("speed", "peers"), "step_ms")
    for text in (repr(rows), rows._repr_html_()):
        assert "step_ms" in text and "step_ms" not in text.partition("columns are shown")[2]


def test_a_choice_of_columns_is_made_of_the_frame(empty: Path) -> None:
    with pytest.raises(UserError, match=r"columns are chosen from the frame: lab.table\(frame\["):
        lab.table(pd.DataFrame({"a": [1]}), ["a"])  # type: ignore[arg-type]
