"""Notebooks executed in this process: an engine of papermill whose cells run in an IPython shell,
without a kernel beside it.

Its imports take 3 s on two CPU cores and 8 s beside a GPU. So it is loaded once, into the fork
server of the command (`multiprocessing`, Linux only). CUDA is untouched there and no thread of
Python runs: a fork is as good as a fresh process.
"""

import base64
import io
import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from lsai_lab.launch.stop import STOPS

# Ctrl-C and batch systems send signals to every process; the fork server must outlive them. They
# wait until a child has decided for itself: one that is ignored while it begins would be lost.
if sys.argv[0] == "-c":  # as the fork server is started
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
# As a kernel sets it; pyplot reads it once.
os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")

import matplotlib.backends.backend_svg
import matplotlib_inline.backend_inline
import pyarrow.parquet
import pydantic
import seaborn
import tokenizers
import torch
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from nbformat.v4 import new_output
from papermill.engines import Engine, NotebookExecutionManager, papermill_engines
from traitlets.config import Config

# read from NVML; beside a GPU the import of dynamo might touch CUDA
if not torch.cuda.device_count():
    import torch._dynamo

PRELOADED = (matplotlib, matplotlib_inline, pyarrow, pydantic, seaborn, tokenizers)
NAME = "in-process"


class _Shell(InteractiveShell):
    """What a cell shows becomes an output of the notebook, in its order."""

    outputs: list[Any] = []
    failed = False

    def enable_gui(self, gui: Any = None) -> None:
        pass

    def add(self, kind: str, **content: Any) -> None:
        for name, value in content.get("data", {}).items():  # pictures
            content["data"][name] = (
                base64.b64encode(value).decode() if isinstance(value, bytes) else value
            )
        self.outputs.append(new_output(kind, **content))  # type: ignore[no-untyped-call]

    def _showtraceback(
        self, kind: type[BaseException], error: BaseException, lines: list[str]
    ) -> None:
        self.failed = True
        self.add("error", ename=kind.__name__, evalue=str(error), traceback=lines)


def _shell() -> _Shell:
    """This process's shell; it keeps no history on disk."""
    settings = Config({"HistoryManager": {"enabled": False}})
    return _Shell.instance(config=settings, displayhook_class=_Hook, display_pub_class=_Publisher)


class _Hook(DisplayHook):
    def write_output_prompt(self) -> None:
        pass

    def finish_displayhook(self) -> None:
        self._is_active = False

    def write_format_data(
        self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None
    ) -> None:
        _shell().add(
            "execute_result",
            data=format_dict,
            metadata=md_dict or {},
            execution_count=self.prompt_count,
        )


class _Publisher(DisplayPublisher):
    def publish(self, data: Any, metadata: Any = None, source: Any = None, **_: Any) -> None:  # type: ignore[override]
        _shell().add("display_data", data=data, metadata=metadata or {})


class _Stream(io.TextIOBase):
    """Standard output or error of a cell."""

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, text: str) -> int:
        shell = _shell()
        if shell.outputs and shell.outputs[-1].get("name") == self.name:
            shell.outputs[-1]["text"] += text
        else:
            shell.add("stream", name=self.name, text=text)
        return len(text)


class InProcess(Engine):
    """papermill's engine of this module."""

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: NotebookExecutionManager, kernel_name: str, **_: Any
    ) -> None:
        shell = _shell()
        shell.enable_matplotlib("inline")
        for index, cell in enumerate(nb_man.nb.cells):
            if cell.cell_type != "code" or not cell.source.strip():
                continue
            shell.outputs = cell.outputs
            nb_man.cell_start(cell, index)
            with redirect_stdout(_Stream("stdout")), redirect_stderr(_Stream("stderr")):
                shell.run_cell(cell.source, store_history=True)
            cell.execution_count = shell.execution_count - 1
            if shell.failed:
                return nb_man.cell_exception(cell, index)
            nb_man.cell_complete(cell, index)


papermill_engines.register(NAME, InProcess)
