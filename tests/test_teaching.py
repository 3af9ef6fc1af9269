"""What a class meets in notebooks: right words, lists in order, errors of one's own lines."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch
from conftest import write_run
from torch import Tensor, nn

import lsai_lab as lab
from lsai_core.base.errors import UserError
from lsai_core.config.model import PRESETS
from lsai_lab.interactive.complete import completions

EAGER = "h100/speed.eager.levers"


def test_a_run_that_exports_its_model_says_what_is_missing(empty: Path) -> None:
    run = lab.open_run("memory", "bf16", profile="quick", overrides={"checkpoint.export": True})
    for ask in (lambda: run.generate("import "), lambda: run.model):
        with pytest.raises(UserError, match=r"has no model yet: .*; execute\(\) ends with its exp"):
            ask()
    with pytest.raises(UserError, match=r"exported no model; run it with overrides=\{'checkpoint"):
        lab.load_model("h100/memory.bf16")


def test_mine_is_no_study(empty: Path) -> None:
    with pytest.raises(UserError, match=r"mine is True or False: .*, not 'speed'"):
        lab.load(mine="speed")  # type: ignore[arg-type]


def test_own_runs_stand_in_the_order_of_their_start(empty: Path) -> None:
    for variant, second in (("bf16", 3), ("baseline", 1), ("window_256", 2)):
        write_run(empty, "memory", variant, repeat=second)  # its start is its second
    assert lab.load(mine=True)["variant"].tolist() == ["baseline", "window_256", "bf16"]


def test_older_kernels_say_that_they_are_not_all(empty: Path) -> None:
    found = lab.kernels(EAGER)
    said = "the 25 with the most time are recorded, 443.83 of 460.35 ms a step"
    assert len(found) == 25 and said in repr(found) and said in (found._repr_html_() or "")
    assert said in repr(lab.find_run(EAGER).kernels.head(3))
    whole = lab.kernels("h200-h/peers.ours_bf16.ours")
    assert len(whole) > 25 and "are recorded" not in repr(whole)


def test_a_training_and_a_search_are_not_compared(empty: Path) -> None:
    with pytest.raises(
        UserError, match=r"one kind: memory\.bf16 .* training, .* of kind batch_sea"
    ):
        lab.compare("h100/memory.bf16", "h100/memory.bf16.batch")


def test_the_tab_key_knows_all_gpus() -> None:
    for text in ('lab.predict("llama3-8b", "', 'lab.simulated_gpu("'):
        names = completions(text, {"lab": lab})[1]
        assert {"T4", "L4", "A10", "RTX 3090", "H100"} <= {*names}, text


def test_an_unknown_model_is_told_the_presets() -> None:
    with pytest.raises(UserError) as error:
        lab.predict("gpt2", "h100")
    assert str(error.value).endswith(f"'gpt2'; presets: {', '.join(PRESETS)}")
    with pytest.raises(UserError, match="did you mean llama3-8b"):
        lab.predict("lama3-8b", "h100")


class Faulty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.TransformerEncoderLayer(16, 2), nn.Linear(16, 4))

    def forward(self, x: Tensor, named: bool) -> Tensor:
        return self.layer(x) if named else self.layers(x)  # type: ignore[operator,no-any-return]


@pytest.mark.parametrize("named", [True, False], ids=["shape", "attribute"])
@pytest.mark.parametrize("way", ["watch", "simulated"])
def test_an_error_of_ones_own_model_shows_ones_own_lines(way: str, named: bool) -> None:
    kind = RuntimeError if named else AttributeError
    with pytest.raises((kind, AssertionError)) as found:
        if way == "simulated":
            with lab.simulated_gpu("h100"):
                Faulty()(torch.randn(3, 2, 17), named)
        else:
            model = Faulty()
            with lab.watch(model, torch.optim.AdamW(model.parameters())):
                model(torch.randn(3, 2, 17), named)
    shown = traceback.extract_tb(found.value.__traceback__)
    names = {Path(frame.filename).name for frame in shown}
    assert names <= {Path(__file__).name, "watch.py"}
    assert "self.layer" in str(shown[-1].line)


def test_a_run_is_one_short_line() -> None:
    for which in ("h100/memory.bf16", EAGER, "h200-h/peers.ours_bf16.ours"):
        said = repr(lab.find_run(which))
        assert all(len(line) < 100 for line in said.splitlines()), said
    assert len(repr(lab.find_run("h100/memory.bf16")).splitlines()) == 1


def test_settings_that_tell_runs_apart_are_shown_whole(empty: Path) -> None:
    long = "optim.name='lion', optim.lr=0.0003, optim.weight_decay=0.3, steps=15, profile=quick"
    write_run(empty, "memory", "bf16")
    runs = lab.load(mine=True)
    runs["differs"] = long
    assert long in repr(runs[["variant", "differs", "run"]])
