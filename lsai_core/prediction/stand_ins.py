"""What a GPU would run, told to fake tensors on any machine: all that is replaced during a
prediction.

A prediction runs the project's real training step on fake CPU tensors. Where that step would take
another way on a GPU, a stand-in with the GPU's memory behaviour takes the place:

- attention: the fused kernels keep q, k, v, their output and one fp32 number per row. `eager` and
  `sdpa_math` are plain operations and run as they are.
- RMSNorm outside of compiled blocks: one fused kernel that keeps its input and one fp32 number per
  row.
- the fused loss: the kernel overwrites logits by their gradient; sums of the weight's gradient go
  into one fp32 matrix.
- clipping and the optimizer: both kernels update in place, so that nothing but the states is
  needed.
- context parallelism: its operators as they are, which on fake tensors exchange nothing; torch's
  own as a fused kernel.
- fp8 layers of packages that may not be installed here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lsai_core.attention.choice import get_backend
from lsai_core.attention.registry import repeat_kv
from lsai_core.config.precision import compute_dtype
from lsai_core.config.train import Fp8Config, TrainConfig
from lsai_core.fp8 import convert
from lsai_core.fp8.recipes import names_of
from lsai_core.model.mlp_chunks import parts
from lsai_core.model.transformer import Transformer
from lsai_core.prediction.tracker import PurposeTracker


@torch.library.custom_op("lsai::predicted_attention", mutates_args=())
def _attention(
    q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, masked: bool, repeats: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("exists for fake tensors only")


@_attention.register_fake
def _(
    q_BSHD: Tensor, _k: Tensor, _v: Tensor, masked: bool, repeats: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    batch, seq_len, heads, _ = q_BSHD.shape
    side = seq_len if masked else 0
    return (
        torch.empty_like(q_BSHD, memory_format=torch.contiguous_format),
        q_BSHD.new_empty((batch, heads, seq_len), dtype=torch.float32),
        q_BSHD.new_empty((side, side)),
    )


@torch.library.custom_op("lsai::predicted_attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor,
    repeats: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("exists for fake tensors only")


@_attention_backward.register_fake
def _(
    _dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.repeats = inputs[4]


def _differentiate(ctx: Any, dout_BSHD: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
    return *_attention_backward(dout_BSHD, *ctx.saved_tensors, ctx.repeats), None, None


_attention.register_autograd(_differentiate, setup_context=_keep)


def _ran(name: str, read: list[Tensor], made: Tensor) -> None:
    """A kernel that no operator here stands for; `made` is like what it makes."""
    if PurposeTracker.active is not None:
        PurposeTracker.active.ran(name, read, read, [made])


ALIKE = 2  # whole chunks of a layer: further ones take and give back the same blocks
# any kernel that keeps q, k, v, the output and one fp32 number per row, with a window, too
FUSED = "fused"


def is_usual(kernel: str) -> bool:
    """Whether `kernel` keeps what `FUSED` does."""
    if kernel == FUSED:
        return True
    backend = get_backend(kernel)
    return backend.grouped and not backend.masked and not backend.plain_operations


def repeats(kernel: str) -> bool:
    """Whether `kernel` makes the gradients of grouped keys and values for every query head, as
    `FUSED` is taken to."""
    return kernel == FUSED or get_backend(kernel).repeats


def expected_kernel(config: TrainConfig) -> str:
    """The attention kernel of a run on a current GPU, `auto` resolved: torch's fused kernels keep
    the same."""
    if config.attention.backend != "auto":
        return config.attention.backend
    return "sdpa_efficient" if compute_dtype(config.precision) == torch.float32 else FUSED


def _attention_as(kernel: str) -> Any:
    def attention(
        q_BSHD: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        *,
        backend: str,
        window: int | None,
        causal: bool = True,
    ) -> Tensor:
        seq_len, heads = q_BSHD.shape[1:3]
        window = None if window is not None and window >= seq_len else window
        if is_usual(kernel):
            return _attention(q_BSHD, k_BSKD, v_BSKD, False, repeats(kernel))[0]
        declared = get_backend(kernel)
        if declared.plain_operations:
            return declared.function(q_BSHD, k_BSKD, v_BSKD, window, causal)
        if not declared.grouped:
            k_BSKD, v_BSKD = repeat_kv(k_BSKD, heads), repeat_kv(v_BSKD, heads)
        return _attention(q_BSHD, k_BSKD, v_BSKD, declared.masked and window is not None)[0]

    return attention


class FusedRMSNorm(nn.RMSNorm):
    """torch's own kernel for GPUs, which runs outside of compiled code: keeps the input and one
    fp32 number per row."""

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, weight_D: Tensor) -> Tensor:
        ctx.save_for_backward(
            x_BSD, weight_D, x_BSD.new_empty(x_BSD.shape[:-1], dtype=torch.float32)
        )
        _ran("rms_norm", [x_BSD], x_BSD)
        return torch.empty_like(x_BSD)

    @staticmethod
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x_BSD, weight_D, _ = ctx.saved_tensors
        _ran("rms_norm_backward", [x_BSD, grad_BSD], x_BSD)
        return torch.empty_like(x_BSD), torch.empty_like(weight_D)


def _cross_entropy_(
    logits_NV: Tensor, targets_N: Tensor, scale: float, *, gradient: bool
) -> Tensor:
    return logits_NV.new_empty(len(targets_N), dtype=torch.float32)


def _plus_product(total: Tensor | None, a_VC: Tensor, b_CD: Tensor, only: bool) -> Tensor:
    if only or a_VC.dtype == torch.float32:
        product = a_VC @ b_CD
        return product if total is None else total
    total = (
        total
        if total is not None
        else a_VC.new_empty((a_VC.shape[0], b_CD.shape[1]), dtype=torch.float32)
    )
    _ran("aten::mm", [a_VC, b_CD], total)
    return total


def _clip_and_update(optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
    return torch.empty(())


class EngineLinear(nn.Linear):
    """Transformer Engine's linear layer: keeps the input in fp8, transposed, and the weight in fp8
    in both layouts."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return _engine(x.flatten(0, -2), self.weight)[0].view(*x.shape[:-1], self.out_features)


@torch.library.custom_op("lsai::predicted_engine", mutates_args=())
def _engine(x_MK: Tensor, weight_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("exists for fake tensors only")


@_engine.register_fake
def _(x_MK: Tensor, weight_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x8 = torch.empty_like(x_MK, dtype=torch.float8_e4m3fn)
    weight8 = weight_NK.new_empty((2, *weight_NK.shape), dtype=torch.float8_e4m3fn)
    return x_MK.new_empty((x_MK.shape[0], weight_NK.shape[0])), x8, weight8


@torch.library.custom_op("lsai::predicted_engine_backward", mutates_args=())
def _engine_backward(
    grad_MN: Tensor, x8_MK: Tensor, weight8_2NK: Tensor, weight_NK: Tensor
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("exists for fake tensors only")


@_engine_backward.register_fake
def _(
    grad_MN: Tensor, x8_MK: Tensor, weight8_2NK: Tensor, weight_NK: Tensor
) -> tuple[Tensor, Tensor]:
    return grad_MN.new_empty(x8_MK.shape), torch.empty_like(weight_NK)


def _keep_fp8(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:], inputs[1])


def _differentiate_engine(ctx: Any, grad_MN: Tensor, *_unused: Tensor) -> tuple[Tensor, Tensor]:
    return _engine_backward(grad_MN, *ctx.saved_tensors)


_engine.register_autograd(_differentiate_engine, setup_context=_keep_fp8)


def _convert(model: Transformer, settings: Fp8Config) -> None:
    """fp8 layers; those of packages by what is like them: torchao's keep what the project's
    `tensorwise` keeps."""
    if not settings.recipe.startswith("te_"):
        like = "tensorwise" if settings.recipe.startswith("torchao_") else settings.recipe
        convert(model, settings.model_copy(update={"recipe": like}))
        return
    for name in names_of(model, settings):
        model.get_submodule(name).__class__ = EngineLinear


@contextlib.contextmanager
def behaviour(kernel: str, on: str) -> Iterator[None]:
    """While open, the project's model and step behave on fake CPU tensors as on a GPU with
    attention kernel `kernel`.

    On a CPU only that is replaced whose arithmetic fake tensors refuse.
    """
    patches: dict[str, Any] = {
        "lsai_core.training.step.clip_and_update": _clip_and_update,
        "lsai_core.fp8.convert": _convert,
        "lsai_core.parallel.adapt.require_host_memory": lambda _config: None,
        "lsai_core.fp8.begin_step": lambda _model: None,
        "lsai_core.fp8.context": lambda _fp8: contextlib.nullcontext(),
        # Ranks that only pretend to exist agree with everything.
        "lsai_core.context.methods._agree": lambda _setting, _group: None,
    }
    if on == "gpu":
        patches |= {
            "lsai_core.model.transformer.attention": _attention_as(kernel),
            "lsai_core.model.loss._cross_entropy_": _cross_entropy_,
            "lsai_core.model.products.plus_product": _plus_product,
            "lsai_core.model.mlp_chunks.parts": lambda n, chunk: parts(
                min(n, ALIKE * chunk + n % chunk), chunk
            ),
            "lsai_core.context.methods.tile_backend": lambda *_request, **_more: None,
            "lsai_core.context.peer.torch_missing": lambda: None,
            "lsai_core.context.peer.torch_attention": lambda q, k, v, _group: _attention(
                q, k, v, False
            )[0],
        }
    with contextlib.ExitStack() as stack:
        for name, stand_in in patches.items():
            stack.enter_context(mock.patch(name, stand_in))
        yield
