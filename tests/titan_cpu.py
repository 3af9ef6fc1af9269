"""The adapter to the installed torchtitan, on a CPU, for tests: torch.cpu answers what torchtitan
asks a GPU's module."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from lsai_lab.machine.environment import package_version
from lsai_lab.peers.run import SERIES
from lsai_lab.peers.watch import Job

adapter: Any = import_module(SERIES[str(package_version("torchtitan")).rsplit(".", 1)[0]])
start = adapter.start


def train(job: Job) -> None:
    """As the adapter's."""
    torch._utils._get_available_device_type = lambda: "cpu"
    answers = {
        "get_device_name": "cpu",
        "get_device_properties": SimpleNamespace(total_memory=2**30),
    }
    answers |= {
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "memory_stats": {},
        "current_device": 0,
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)
    # torchtitan has the gradients summed by FSDP, times 1; gloo has no product with the sum.
    torch.distributed.ReduceOp.PREMUL_SUM = lambda factor: {1.0: torch.distributed.ReduceOp.SUM}[
        factor
    ]
    adapter.train(job)
