"""Kernels that are ready before they are wanted: forked from a process that has imported what every notebook imports.

To start Python and import torch, pandas, matplotlib and Jupyter takes 3 s on two CPU cores and 8 s beside a GPU, for every run and chapter.
So this module is loaded once, into the fork server of the command (`multiprocessing`, Linux only), and each notebook's process, and the
kernel below it, are forked from there in milliseconds. CUDA is untouched until then, nothing of this project is imported but this file,
and no thread of Python runs: a fork is as good as a fresh process. Elsewhere jupyter_client starts kernels as always.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

# Ctrl-C and batch systems send signals to every process; the fork server must outlive them (its children decide for themselves).
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
if sys.argv[0] == "-c":  # as the fork server is started
    for _number in IGNORED:
        signal.signal(_number, lambda *_: None)
# As a kernel sets it; pyplot reads it once.
os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")

import matplotlib.backends.backend_svg
import matplotlib.pyplot
import matplotlib_inline.backend_inline
import pandas
import papermill
import pyarrow.parquet
import pydantic
import seaborn
import tokenizers
import torch
from ipykernel.kernelapp import IPKernelApp
from jupyter_client.manager import AsyncKernelManager

if not torch.cuda.device_count():  # read from NVML; beside a GPU the import of dynamo might touch CUDA
    import torch._dynamo

PRELOADED = (matplotlib, matplotlib_inline, pandas, papermill, pyarrow, pydantic, seaborn, tokenizers, torch)


class ForkedKernel:
    """A kernel that waits, forked from this process, until it is told its connection file; to jupyter_client it is a `subprocess.Popen`.

    Fork it before this process starts threads.
    """

    stdin = stdout = stderr = None

    def __init__(self) -> None:
        told, self._tell = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._tell)
            _become_kernel(told)
        os.close(told)

    def manager(self) -> type[AsyncKernelManager]:
        """A manager whose kernel is this one."""
        kernel = self

        class Manager(AsyncKernelManager):
            async def _async_launch_kernel(self, kernel_cmd: list[str], **options: Any) -> None:
                provisioner: Any = self.provisioner
                provisioner.process, provisioner.pid, provisioner.pgid = kernel, kernel.pid, os.getpgid(kernel.pid)
                os.write(kernel._tell, self.connection_file.encode())
                os.close(kernel._tell)

        return Manager

    def poll(self) -> int | None:
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self) -> int | None:
        while self.poll() is None:
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become_kernel(told: int) -> None:
    os.setsid()  # an interrupt is for the kernel and what it started
    for number in IGNORED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if not (connection := os.read(told, 65536).decode()):
        os._exit(0)  # nobody wants it any more
    os.environ["JPY_PARENT_PID"] = str(
        os.getppid()
    )  # for what the kernel starts; its own setting was read before the fork
    if threads := os.environ.get("OMP_NUM_THREADS", ""):  # which torch had read before
        torch.set_num_threads(int(threads))
    IPKernelApp.launch_instance(["-f", connection], parent_handle=os.getppid())
    os._exit(0)
