"""Delayed scaling: the scale of a tensor comes from its largest magnitudes in earlier steps.

A current scale needs the whole tensor before its first value can be rounded: one more pass over
memory per tensor, and no fusion of the rounding with what produces the tensor. Magnitudes change
slowly during training, so the largest of the last `HISTORY` steps serves instead (NVIDIA
Transformer Engine; Micikevicius et al. 2022, arXiv:2209.05433). A value beyond it saturates. The
first step has no history: every tensor is measured before it is cast (`calibrating`), as are layers
that are used on their own.

Each converted module holds a state of fp32 (n, 3, 4) for its n tensors: scale, 1 / scale, and the
maximum seen in this step, each at the start of 16 bytes. Kernels update the maximum in place. A
step begins with the scales that follow from the history and ends with its maxima, of all processes,
in the history. So the history, one buffer of the model, is all that a checkpoint needs to hold: a
resumed run continues with the same scales, to the last bit. What validation sees between steps does
not count.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

HISTORY = 16
SCALE, INVERSE, LARGEST = 0, 1, 2

_calibrating = True  # until a step begins with a history; a newly converted model has none


def calibrating() -> bool:
    """Whether this step measures every tensor before it is cast."""
    return _calibrating


def new_state(dtypes: Sequence[torch.dtype]) -> Tensor:
    """State of `len(dtypes)` tensors, without any history; `Scales` fills it."""
    return torch.zeros(len(dtypes), 3, 4)


def calibrate(state_34: Tensor, largest: Tensor, dtype: torch.dtype) -> None:
    """Set the scale from the tensor's own largest magnitude (a scalar)."""
    scale = torch.where(largest > 0, torch.finfo(dtype).max / largest.float(), 1.0)
    state_34[SCALE, 0], state_34[INVERSE, 0] = scale, 1.0 / scale


class Scales(nn.Module):
    """The scaling states of all converted modules of a model, and their history."""

    history_HT: Tensor

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        """`modules`: each with a buffer `state` (n, 3, 4) and the fp8 dtypes of its n tensors in
        `dtypes`."""
        global _calibrating
        super().__init__()
        # a tuple: no second registration of the same modules
        self._modules_with_state = tuple(modules)
        limits = [torch.finfo(dtype).max for module in modules for dtype in module.dtypes]  # type: ignore[union-attr]
        self._limits, self._calibrated = tuple(limits), False
        self.register_buffer("history_HT", torch.zeros(HISTORY, len(limits), device=device))
        _calibrating = True

    @torch.no_grad()
    def reset(self) -> None:
        """Forget everything; to be called once the buffers of a model that was shaped on the meta
        device have memory."""
        for tensor in (self.history_HT, *self._states()):
            tensor.zero_()

    @torch.no_grad()
    def begin_step(self) -> None:
        """Make this step's scales from the history, and forget the maxima seen since the last
        step."""
        global _calibrating
        if not self._calibrated:
            # Asked until it is so: a run that starts has no history in its first step, one that
            # resumes brings its own.
            self._calibrated = bool((self.history_HT > 0).any())
        _calibrating = not self._calibrated
        if _calibrating:
            return
        if not hasattr(self, "_limits_T"):
            self._limits_T = torch.tensor(self._limits, device=self.history_HT.device)
        largest_T, states = self.history_HT.amax(0), self._states()
        scale_T = torch.where(largest_T > 0, self._limits_T / largest_T, 1.0)
        fresh_T3 = torch.stack((scale_T, 1.0 / scale_T, torch.zeros_like(scale_T)), dim=1)
        fresh_T34 = fresh_T3[:, :, None].expand(-1, -1, 4).contiguous()
        torch._foreach_copy_(states, list(fresh_T34.split([len(state) for state in states])))

    @torch.no_grad()
    def end_step(self) -> None:
        """Move the maxima of this step into the history; processes that train together agree on the
        largest."""
        seen_T = torch.cat([state[:, LARGEST, 0] for state in self._states()])
        if dist.is_initialized():
            dist.all_reduce(seen_T, dist.ReduceOp.MAX)
        self.history_HT.copy_(torch.cat((seen_T[None], self.history_HT[:-1])))

    def _states(self) -> list[Tensor]:
        return [module.state for module in self._modules_with_state]  # type: ignore[misc]
