"""What stands in a simulated model for a GPU's kernels: objects that are handed over.

A prediction runs the project's real training step on fake CPU tensors that stand for a GPU's
(`lsai_core.kernels.FakeGpu`). Custom operators then run by their fake implementations. What is no
operator of this project gets an object with the GPU's memory behaviour in its place:

- attention: the fused kernels keep q, k, v, their output and one fp32 number per row. A backend
  that does not say that it is fused runs as it is, operation by operation.
- RMSNorm outside of compiled blocks: one fused kernel that keeps its input and one fp32 number per
  row.
- clipping and the optimizer: kernels update in place, so that nothing but the states is needed; an
  optimizer of plain operations runs as it is.
- context parallelism: its operators as they are, which on fake tensors exchange nothing; torch's
  own as a fused kernel.
- fp8 layers of packages that may not be installed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lsai_core.attention.choice import get_backend
from lsai_core.attention.registry import Backend, repeat_kv
from lsai_core.base.errors import UserError
from lsai_core.config.precision import compute_dtype
from lsai_core.config.train import Fp8Config, TrainConfig
from lsai_core.context.methods import ContextParallel, ContextSetting
from lsai_core.fp8.recipes import convert
from lsai_core.fp8.scales import Scales
from lsai_core.kernels import fake_operator
from lsai_core.model.norm import Norm, whole_weight
from lsai_core.model.transformer import Transformer
from lsai_core.optimizers.base import FactorOptimizer, parts_of, pieces
from lsai_core.prediction.tracker import PurposeTracker


@fake_operator("lsai::predicted_attention")
def _attention(
    q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, masked: bool, repeats: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    batch, seq_len, heads, _ = q_BSHD.shape
    side = seq_len if masked else 0
    return (
        torch.empty_like(q_BSHD, memory_format=torch.contiguous_format),
        q_BSHD.new_empty((batch, heads, seq_len), dtype=torch.float32),
        q_BSHD.new_empty((side, side)),
    )


@fake_operator("lsai::predicted_attention_backward")
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


# any kernel that keeps q, k, v, the output and one fp32 number per row, with a window, too
FUSED = "fused"


def is_usual(kernel: str) -> bool:
    """Whether `kernel` keeps what `FUSED` does."""
    if kernel == FUSED:
        return True
    backend = get_backend(kernel)
    return backend.fused and backend.grouped and not backend.masked


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


def attention_as(kernel: str) -> Callable[..., Tensor]:
    """`lsai_core.attention.attention` as `kernel` would use a GPU's memory."""

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
        if not declared.fused:
            return _as_it_runs(declared, q_BSHD, k_BSKD, v_BSKD, window, causal)
        if not declared.grouped:
            k_BSKD, v_BSKD = repeat_kv(k_BSKD, heads), repeat_kv(v_BSKD, heads)
        return _attention(q_BSHD, k_BSKD, v_BSKD, declared.masked and window is not None)[0]

    return attention


def _as_it_runs(backend: Backend, *request: Any) -> Tensor:
    try:
        return backend.function(*request)
    except Exception as error:  # a kernel that asks for memory that does not exist fails in any way
        if isinstance(error, RuntimeError) and "overflow" in str(error):
            raise  # larger than any tensor can be, whatever the kernel is
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"attention backend {backend.name!r} cannot be simulated: it is no plain operations, "
            f"and does not say that it is fused; {type(error).__name__}: {reason}"
        ) from None


class FusedRMSNorm(Norm):
    """torch's own kernel for GPUs, which runs outside of compiled code: keeps the input and one
    fp32 number per row."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, whole_weight(self))


def rms_norm(x_BSD: Tensor, weight_D: Tensor) -> Tensor:
    """RMSNorm as far as memory goes: the output has a shape and no values."""
    return _RMSNorm.apply(x_BSD, weight_D)


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


ALIKE = 2  # whole pieces of an update: further ones take and give back the same blocks


def few_pieces(rows: int, at_once: int) -> list[tuple[int, int]]:
    """The pieces of an update that differ in what they take from memory."""
    return pieces(min(rows, ALIKE * at_once + rows % at_once), at_once)


def update_on_gpu(optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
    """`clip_and_update`: kernels need nothing beside the states; other optimizers run, by lists of
    tensors, as torch has it on a GPU unless they are slices."""
    for part in parts_of(optimizer):
        if isinstance(part, FactorOptimizer) or part.defaults.get("fused"):
            continue
        for group in part.param_groups:
            sliced = any(isinstance(p, DTensor) for p in group["params"])
            if group.get("foreach", False) is None and not sliced:
                group["foreach"] = True
        part.step()
    return torch.empty(())


def update_on_host(_optimizer: torch.optim.Optimizer, _limit: float) -> Tensor:
    """`clip_and_update` in host memory, which takes nothing from a GPU."""
    return torch.empty(())


class KnownScales(Scales):
    """The scales of delayed scaling in every step but the first, when they are known."""

    def begin_step(self) -> None:
        """Do nothing: the scales are known."""


class PretendedRanks(ContextParallel):
    """Context parallelism among ranks of which only this process exists."""

    def agree(self, setting: ContextSetting, group: dist.ProcessGroup | None) -> None:
        """Do nothing: there is one setting, so the ranks agree."""


class PretendedGpus(PretendedRanks):
    """`PretendedRanks` on GPUs that have every kernel; torch's own context parallelism keeps what a
    fused kernel keeps."""

    def require_peer(self) -> None:
        """Do nothing: it is taken to be there."""

    def require_kernel(self, q_BSHD: Tensor, *, grouped: bool) -> None:
        """Do nothing: it is taken to be there."""

    def peer_attention(self, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> Tensor:
        """The output of a fused kernel, with what it keeps."""
        return _attention(q_BSHD, k_BSKD, v_BSKD, False)[0]


class EngineLinear(nn.Linear):
    """Transformer Engine's linear layer: keeps the input in fp8, transposed, and the weight in fp8
    in both layouts."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return _engine(x.flatten(0, -2), self.weight)[0].view(*x.shape[:-1], self.out_features)


@fake_operator("lsai::predicted_engine")
def _engine(x_MK: Tensor, weight_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x8 = torch.empty_like(x_MK, dtype=torch.float8_e4m3fn)
    weight8 = weight_NK.new_empty((2, *weight_NK.shape), dtype=torch.float8_e4m3fn)
    return x_MK.new_empty((x_MK.shape[0], weight_NK.shape[0])), x8, weight8


@fake_operator("lsai::predicted_engine_backward")
def _engine_backward(
    grad_MN: Tensor, x8_MK: Tensor, weight8_2NK: Tensor, weight_NK: Tensor
) -> tuple[Tensor, Tensor]:
    return grad_MN.new_empty(x8_MK.shape), torch.empty_like(weight_NK)


def _keep_fp8(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:], inputs[1])


def _differentiate_engine(ctx: Any, grad_MN: Tensor, *_unused: Tensor) -> tuple[Tensor, Tensor]:
    return _engine_backward(grad_MN, *ctx.saved_tensors)


_engine.register_autograd(_differentiate_engine, setup_context=_keep_fp8)


def convert_as(
    names_of: Callable[[Transformer, Fp8Config], list[str]],
) -> Callable[[Transformer, Fp8Config], None]:
    """What makes fp8 layers of those that `names_of` names; those of packages by what is like them:
    torchao's keep what the project's `tensorwise` keeps."""

    def convert_layers(model: Transformer, settings: Fp8Config) -> None:
        if settings.recipe.startswith("te_"):
            for name in names_of(model, settings):
                model.get_submodule(name).__class__ = EngineLinear
            return
        like = "tensorwise" if settings.recipe.startswith("torchao_") else settings.recipe
        convert(model, settings.model_copy(update={"recipe": like}), names_of)
        if model.fp8_scales is not None:
            model.fp8_scales.__class__ = KnownScales

    return convert_layers
