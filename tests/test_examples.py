"""Every public name of `lab` is explained with an example, and each example says what is so."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import lsai_lab as lab
from lsai_lab.project.files import PAGE_FOLDER

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def ran(name: str) -> tuple[int, str]:
    """How many examples the name's help has, and what of them is not as it says."""
    InteractiveShell.instance()  # shows a figure as a notebook does
    names = {"lab": lab, "plt": plt, "torch": torch}
    source = inspect.getdoc(getattr(lab, name)) or ""
    test = doctest.DocTestParser().get_doctest(source, names, f"lab.{name}", None, None)
    told: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=told.append)
    plt.close("all")
    return len(test.examples), "".join(told)


OF_A_TRAINED_MODEL = ("generate", "load_model")


@pytest.mark.parametrize("name", [name for name in lab.__all__ if name not in OF_A_TRAINED_MODEL])
def test_an_example(empty: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "plan":  # nobody watches how far it is
        monkeypatch.setenv(PAGE_FOLDER, str(empty))
    examples, told = ran(name)
    assert examples and not told, told


@pytest.mark.slow
def test_examples_of_a_trained_model(empty: Path, capsys: Any) -> None:
    overrides = {"steps": 4, "checkpoint.export": True}
    lab.open_run("memory", "bf16", profile="quick", name="first", overrides=overrides).execute()
    for name in OF_A_TRAINED_MODEL:
        examples, told = ran(name)
        assert examples and not told, told


@pytest.mark.parametrize("name", lab.__all__)
def test_a_help_says_what_it_gives_and_takes_little_room(name: str) -> None:
    function = getattr(lab, name)
    words = (inspect.getdoc(function) or "").split()
    assert 8 < len(words) < 330, len(words)
    assert "return" in function.__annotations__, "its signature says what it returns"
