"""ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054; PyTorch's ZeroRedundancyOptimizer).

As DDP, but each parameter has one process that keeps its optimizer states and updates it; the
others get the new weights from there. Parameters are spread over the processes by their size, whole
ones, so that shares differ by up to the largest of them.
"""

from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from lsai_core.base.errors import UserError
from lsai_core.model.transformer import Transformer
from lsai_core.parallel.kinds.ddp import wrap
from lsai_core.parallel.way import Build, Way, only_copies


class SpreadOptimizer(ZeroRedundancyOptimizer):
    """The processes' optimizer together; `held` is the one of what this process keeps."""

    @property
    def held(self) -> torch.optim.Optimizer:
        return self.optim

    @property
    def sizes(self) -> list[int]:
        """How many numbers each process updates."""
        shares = self._partition_parameters()  # type: ignore[attr-defined]
        return [sum(p.numel() for group in own for p in group["params"]) for own in shares]


def spread(build: Build, model: Transformer) -> torch.optim.Optimizer:
    """What `build` makes of all parameters, its states spread over the processes.

    Raises UserError for an optimizer that groups some parameters otherwise than all of them.
    """
    whole = build(model)  # it has no states yet
    names = {parameter: name for name, parameter in model.named_parameters()}

    def own(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        mine = {names[p]: p for group in groups for p in group["params"]}
        if not mine:
            raise UserError("parallel.kind zero1 has more processes than the model parameters")
        optimizer = build(model, parameters=mine)
        given = [group["params"] for group in groups]
        if [group["params"] for group in optimizer.param_groups] != given:
            raise UserError("parallel.kind zero1 cannot spread the states of this optimizer")
        if hasattr(whole, "numbers"):  # random bits are those of the whole model
            optimizer.numbers = whole.numbers  # type: ignore[attr-defined]
        return optimizer

    return SpreadOptimizer(whole.param_groups, own)  # type: ignore[arg-type]


WAY = Way(wrap=wrap, optimizer=spread, refusal=only_copies)
