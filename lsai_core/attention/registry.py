"""What a kernel is and what it can do: `Backend` declares its limits as data, `Case` is one
request.

Two questions are kept apart, because they have different answers for the user.
`Backend.missing(device)` asks about the machine (a package, a GPU, its generation).
`Backend.unsupported(case)` asks about the request (dtype, head dimension, window), which no other
machine of that kind would answer differently.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lsai_core.kernels import AMPERE, NOT_NVIDIA, cuda_capability, on_rocm

HALF = frozenset({torch.float16, torch.bfloat16})
FLOATING = HALF | {torch.float32, torch.float64}
AMPERE_ON = (AMPERE, (99, 0))


@dataclass(frozen=True)
class Case:
    """One attention request. `window` is None where it does not restrict anything (window >=
    sequence length).

    Whether a kernel can serve a case never depends on the length, except for `single_token`. Which
    one is fastest does, on its nearest power of two: `length`, None where nobody asked for the
    fastest. torch.compile can so keep the length itself symbolic. `grouped`: several query heads
    share a key-value head; `training`: gradients are wanted.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    window: int | None = None
    single_token: bool = False
    causal: bool = True
    grouped: bool = False
    length: int | None = None
    training: bool = True


Bound = int | None


@dataclass(frozen=True, eq=False)
class TileKernel:
    """A kernel beneath autograd, for one tile of attention that several processes share.

    `forward(q_BSHD, k_BTKD, v_BTKD, left, right) -> (out_BSHD, lse_BHS)` and
    `backward(dout_BSHD, q, k, v, out_BSHD, lse_BHS, left, right) -> (dq, dk, dv)`, gradients in the
    shapes of their inputs. Query i sees the keys j with i - left <= j <= i + right; None is no
    bound. out in the dtype of q, lse in fp32 (fp64 for fp64 inputs): the natural logarithm of the
    sum of exp(scores), scores scaled by 1/sqrt(D).

    Attention over all keys is put together from attention over some of them by their lse. In the
    backward pass a tile gets `out` and `lse` of the *whole* attention: exp(score - lse) is then the
    true probability, and the gradients of the tiles add up (Dao et al. 2022, arXiv:2205.14135,
    section 3.1; Liu et al. 2023, arXiv:2310.01889).
    """

    forward: Callable[[Tensor, Tensor, Tensor, Bound, Bound], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Backend:
    """One attention kernel.

    `function(q_BSHD, k_BSKD, v_BSKD, window, causal) -> out_BSHD` takes any H % K == 0; kernels
    without grouped-query attention repeat the key-value heads themselves; a window comes with
    `causal` only. `dtypes` maps each device type that the kernel exists for to its dtypes; `window`
    holds the device types on which it can restrict attention, `forward_only` those on which it has
    no backward pass. `rocm`: torch brings it for AMD's GPUs, too. `load` imports what the kernel
    needs and raises if it cannot.

    For memory: `fused` says that it is one kernel that keeps q, k, v, the output and one fp32
    number per row, and nothing else. Without it a prediction runs `function` as it is, operation by
    operation, which is right for plain operations and never too low. Of a fused one, `grouped`: it
    takes K < H heads as they are, otherwise it keeps them repeated; `repeats`: it makes their
    gradients for every query head, otherwise it sums them in fp32; `masked`: a window is a mask of
    S x S values. `operators`: its operators as torch names them ("namespace::name", or a
    namespace), whose results selective checkpointing keeps; not needed where the name has
    "attention" in it. `speed`: its place among others where nothing was measured, the highest first
    (in bf16, causal, on Hopper).

    `tiles`: the kernel beneath, where it returns its log-sum-exp: context parallelism needs that.

    `about`, `color` and `marker` (matplotlib's) are for tables and figures; `install`: what pip is
    given for its package.
    """

    name: str
    function: Callable[[Tensor, Tensor, Tensor, int | None, bool], Tensor]
    dtypes: Mapping[str, frozenset[torch.dtype]]
    window: frozenset[str] = frozenset()
    head_dims: tuple[int, int] = (1, 1 << 16)
    head_dim_multiple: int = 1
    single_token: bool = True
    compute_capability: tuple[tuple[int, int], tuple[int, int]] | None = None
    forward_only: frozenset[str] = frozenset()
    fused: bool = False
    rocm: bool = False
    load: Callable[[], object] | None = None
    grouped: bool = True
    repeats: bool = True
    masked: bool = False
    speed: int = 0
    operators: frozenset[str] = frozenset()
    tiles: TileKernel | None = None
    about: str = ""
    color: str = "#777777"
    marker: str = "h"
    install: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dtypes, Mapping) or not all(map(_are_dtypes, self.dtypes.values())):
            raise TypeError(
                f"dtypes of a Backend maps device types to sets of torch's dtypes, such as "
                f'{{"cpu": FLOATING}}, not {self.dtypes!r:.80}'
            )

    @property
    def half_only(self) -> bool:
        """Whether it takes 16-bit inputs only, on GPUs if it exists there. Refused in fp32 on every
        machine, so that a config means the same everywhere."""
        return torch.float32 not in self.dtypes.get(
            "cuda", frozenset().union(*self.dtypes.values())
        )

    @property
    def windowed(self) -> bool:
        """Whether it can restrict attention to the last `window` positions, on GPUs if it exists
        there."""
        return "cuda" in self.window or bool(self.window and "cuda" not in self.dtypes)

    def missing(self, device: torch.device, training: bool = True) -> str | None:
        """Why this machine cannot run the kernel on `device` (for `training`: and its gradient);
        None if it can."""
        if training and device.type in self.forward_only:
            return f"has no backward pass on {device.type}"
        return _missing(self, device)

    def unsupported(self, case: Case) -> str | None:
        """Why the kernel cannot serve `case` on any machine with that device type; None if it
        can."""
        dtypes = self.dtypes.get(case.device_type, frozenset())
        low, high = self.head_dims
        if case.dtype not in dtypes:
            known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            return (
                f"takes {known} on {case.device_type}, not {str(case.dtype).removeprefix('torch.')}"
            )
        if not low <= case.head_dim <= high or case.head_dim % self.head_dim_multiple:
            taken = f"{low} to {high} in multiples of {self.head_dim_multiple}"
            return f"takes head dimensions {taken}, not {case.head_dim}"
        if case.window is not None and case.device_type not in self.window:
            return f"has no sliding window on {case.device_type}"
        if case.single_token and not self.single_token:
            return "takes sequences of at least two tokens"
        return None


def _are_dtypes(given: Any) -> bool:
    return isinstance(given, Collection) and all(isinstance(one, torch.dtype) for one in given)


@functools.cache
def _missing(backend: Backend, device: torch.device) -> str | None:
    if device.type not in backend.dtypes:
        return f"exists for {' and '.join(sorted(backend.dtypes))} only, not for {device.type}"
    # Plain operations run wherever their tensors can be made, fake CUDA tensors on a laptop
    # included.
    if device.type == "cuda" and backend.fused:
        if not torch.cuda.is_available():
            return "needs a CUDA GPU, and this machine has none"
        if on_rocm():
            return None if backend.rocm else NOT_NVIDIA
        if backend.compute_capability is not None:
            (low, high), found = backend.compute_capability, cuda_capability(device)
            if not low <= found <= high:
                return (
                    f"needs CUDA compute capability {_dotted(low)} to {_dotted(high)}, this "
                    f"GPU "
                    f"has {_dotted(found)}"
                )
    if backend.load is not None:
        try:
            backend.load()
        except Exception as error:  # a broken binary package fails in any way it likes
            return (
                f"cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            )
    return None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def first_output(result: Any) -> Tensor:
    """Versions of packages differ in whether they return the log-sum-exp beside the output."""
    return result[0] if isinstance(result, tuple) else result


def repeat_kv(x_BSKD: Tensor, n_heads: int) -> Tensor:
    """Repeat each key-value head for its group of query heads: (B, S, K, D) -> (B, S, H, D); a
    no-op for H == K."""
    groups = n_heads // x_BSKD.shape[2]
    return x_BSKD if groups == 1 else x_BSKD.repeat_interleave(groups, dim=2)


def band_mask(seq_len: int, window: int | None, device: torch.device) -> Tensor:
    """bool (S, S), True where position i may attend to j: j <= i, and i - window < j if there is a
    window."""
    position_S = torch.arange(seq_len, device=device)
    distance_SS = position_S[:, None] - position_S[None, :]
    causal_SS = distance_SS >= 0
    return causal_SS if window is None else causal_SS & (distance_SS < window)
