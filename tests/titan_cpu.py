"""The adapter to torchtitan 0.3 on a CPU, for tests: torch.cpu answers what torchtitan asks a GPU's module."""

from types import SimpleNamespace

import torch

from lsai_lab.peers import titan3
from lsai_lab.peers.titan3 import start as start
from lsai_lab.peers.watch import Job


def train(job: Job) -> None:
    """As `titan3.train`."""
    torch._utils._get_available_device_type = lambda: "cpu"
    answers = {"get_device_name": "cpu", "get_device_properties": SimpleNamespace(total_memory=2**30)}
    answers |= {"reset_peak_memory_stats": None, "empty_cache": None, "memory_stats": {}, "current_device": 0}
    for name, answer in answers.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)
    # torchtitan has the gradients summed by FSDP, times 1; gloo has no product with the sum.
    torch.distributed.ReduceOp.PREMUL_SUM = lambda factor: {1.0: torch.distributed.ReduceOp.SUM}[factor]
    titan3.train(job)
