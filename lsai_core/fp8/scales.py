"""Delayed scaling: the scale of a tensor comes from its largest magnitudes in earlier steps.

A current scale needs the whole tensor before its first value can be rounded: one more pass over memory per tensor, and no fusion
of the rounding with what produces the tensor. Magnitudes change slowly during training, so the largest of the last `HISTORY`
steps serves instead (NVIDIA Transformer Engine; Micikevicius et al. 2022, arXiv:2209.05433). A value beyond it
saturates. The first step has no history: every tensor is measured before it is cast (`calibrating`), as are layers that are used on
their own.

Each converted module holds a state of fp32 (n, 3, 4) for its n tensors: scale, 1 / scale, and the maximum seen in this step, each
at the start of 16 bytes. Kernels update the maximum in place. The history of all modules is one buffer of the model, so
that checkpoints hold it and a resumed run continues with the same scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

HISTORY = 16
SCALE, INVERSE, LARGEST = 0, 1, 2

_calibrating = True  # until the first `Scales.advance` of the process


def calibrating() -> bool:
    """Whether this step measures every tensor before it is cast."""
    return _calibrating


def new_state(dtypes: Sequence[torch.dtype]) -> Tensor:
    """State of `len(dtypes)` tensors, without any history; `Scales` fills it."""
    return torch.zeros(len(dtypes), 3, 4)


def calibrate(state_34: Tensor, largest: Tensor, dtype: torch.dtype) -> None:
    """Set the scale from the tensor's own largest magnitude (a scalar)."""
    scale = torch.where(largest > 0, torch.finfo(dtype).max / largest.float(), 1.0)
    state_34[SCALE, 0], state_34[INVERSE, 0], state_34[LARGEST, 0] = scale, 1.0 / scale, largest


class Scales(nn.Module):
    """The scaling states of all converted modules of a model. `advance` before each step."""

    history_HT: Tensor

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """`modules`: each with a buffer `state` (n, 3, 4) and the fp8 dtypes of its n tensors in `dtypes`."""
        super().__init__()
        self._modules_with_state = tuple(modules)  # a tuple: no second registration of the same modules
        limits = [torch.finfo(dtype).max for module in modules for dtype in module.dtypes]  # type: ignore[union-attr]
        self._limits, self._calibrated = tuple(limits), False
        self.register_buffer("history_HT", torch.zeros(HISTORY, len(limits)))

    @torch.no_grad()
    def reset(self) -> None:
        """Forget everything; to be called once the buffers have memory."""
        self.history_HT.zero_()
        for state in self._states():
            state.zero_()

    @torch.no_grad()
    def advance(self) -> None:
        """Move the maxima of the last step into the history and make the scales of the next one."""
        global _calibrating
        states = self._states()
        seen_T = torch.cat([state[:, LARGEST, 0] for state in states])
        if not self._calibrated:
            # Once per process: a run that starts has no history, one that resumes brings its own.
            self._calibrated = bool((self.history_HT > 0).any() | (seen_T > 0).any())
        _calibrating = not self._calibrated
        if _calibrating:
            return
        if not hasattr(self, "_limits_T"):
            self._limits_T = torch.tensor(self._limits, device=seen_T.device)
        # A resumed run's first step has seen nothing yet; its history is complete as it is.
        rolled_HT = torch.cat((seen_T[None], self.history_HT[:-1]))
        self.history_HT.copy_(torch.where((seen_T > 0).any(), rolled_HT, self.history_HT))
        largest_T = self.history_HT.amax(0)
        scale_T = torch.where(largest_T > 0, self._limits_T / largest_T, 1.0)
        fresh_T3 = torch.stack((scale_T, 1.0 / scale_T, torch.zeros_like(scale_T)), dim=1)
        fresh_T34 = fresh_T3[:, :, None].expand(-1, -1, 4).contiguous()
        torch._foreach_copy_(states, list(fresh_T34.split([len(state) for state in states])))

    def _states(self) -> list[Tensor]:
        return [module.state for module in self._modules_with_state]  # type: ignore[misc]
