"""Recurrent layers as cuDNN runs them (ATen/native/cudnn/RNN.cpp), for tensors without memory.

All layers are one operator. For the backward pass it reserves one block: of every layer, direction
and step the gates and what goes with them, of all but the last layer the output, with dropout one
bit per value of these. The weights' gradients are views of one buffer. Autocast casts input,
states and weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lsai_core.kernels import fake_operator

LSTM, GRU, PLAIN = 4, 3, 1  # gates
# Values that are reserved of a layer, direction and step; those of LSTM and GRU off the sizes of
# blocks on an H100 (cuDNN 9).
_RESERVED = {LSTM: 5, GRU: 6, PLAIN: 2}


def _run(
    x: Tensor,
    hx: Tensor,
    cx: Tensor,
    params: list[Tensor],
    gates: int,
    layers: int,
    dropout: float,
    train: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x, hx, cx = (tensor.to(dtype) for tensor in (x, hx, cx))
        params = [tensor.to(dtype) for tensor in params]
    if batch_first:
        x = x.transpose(0, 1)
    out, last, cell, _ = recurrent(x, hx, cx, params, gates, layers, dropout if train else 0, train)
    return out.transpose(0, 1) if batch_first else out, last, cell


def lstm(
    x: Tensor,
    hx: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`torch.lstm`: output, last hidden and last cell states."""
    return _run(x, hx[0], hx[1], params, LSTM, num_layers, dropout, train, batch_first)


def of_gates(gates: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """`torch.gru` and its kind, with so many gates and without cell states."""

    def run(
        x: Tensor,
        hx: Tensor,
        params: list[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, Tensor]:
        found = _run(x, hx, hx, params, gates, num_layers, dropout, train, batch_first)
        return found[:2]

    return run


@fake_operator("lsai::recurrent")
def recurrent(
    x_TBD: Tensor,
    hx: Tensor,
    cx: Tensor,
    weights: list[Tensor],
    gates: int,
    layers: int,
    dropout: float,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, last hidden and cell states, and what is reserved for the backward pass (bytes)."""
    length, batch = x_TBD.shape[:2]
    directions, width = hx.shape[0] // layers, hx.shape[2]
    out = x_TBD.new_empty((length, batch, directions * width))
    values, bits = _RESERVED[gates] * layers + layers - 1, (layers - 1) if dropout else 0
    reserved = out.numel() * (values * out.element_size() + bits / 8) if train else 0
    kept = x_TBD.new_empty(int(reserved), dtype=torch.uint8)
    return out, torch.empty_like(hx), torch.empty_like(cx), kept


@fake_operator("lsai::recurrent_backward")
def recurrent_backward(
    dout: Tensor, x: Tensor, hx: Tensor, weights: list[Tensor], gates: int
) -> list[Tensor]:
    """Gradients of the input and both states, and of all weights in one buffer."""
    total = sum(weight.numel() for weight in weights)
    return [*(torch.empty_like(tensor) for tensor in (x, hx, hx)), x.new_empty(total)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, hx, cx, weights, gates, *_ = inputs
    ctx.gates = gates
    ctx.save_for_backward(x, hx, cx, *output, *weights)


def _gradients(ctx: Any, dout: Tensor, *_others: Tensor) -> tuple[Any, ...]:
    x, hx, _, _, _, _, _, *weights = ctx.saved_tensors
    dx, dhx, dcx, together = recurrent_backward(dout, x, hx, weights, ctx.gates)
    parts = together.split([weight.numel() for weight in weights])
    shaped = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
    return dx, dhx, dcx, shaped, None, None, None, None


recurrent.register_autograd(_gradients, setup_context=_keep)
