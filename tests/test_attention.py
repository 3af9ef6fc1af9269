"""Every attention backend against a float64 reference written out here, forward and all three
gradients."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from lsai_core.attention import Case, attention, available_backends, choose, get_backend, resolve
from lsai_core.base.errors import Unavailable, UserError

CPU_BACKENDS = ["auto", "eager", "sdpa_math", "sdpa_flash", "flex"]
CUDA_BACKENDS = [*CPU_BACKENDS, "sdpa_efficient", "sdpa_cudnn", "fa2", "fa3", "fa4"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def reference(
    q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, window: int | None, causal: bool = True
) -> Tensor:
    """The definition, with the allowed pairs written out one by one."""
    positions, groups = range(q_BSHD.shape[1]), q_BSHD.shape[2] // k_BSKD.shape[2]
    allowed = [
        [not causal or (j <= i and (window is None or i - window < j)) for j in positions]
        for i in positions
    ]
    k_BSHD, v_BSHD = (
        x[:, :, [h // groups for h in range(q_BSHD.shape[2])]] for x in (k_BSKD, v_BSKD)
    )
    scores = torch.einsum("bihd,bjhd->bhij", q_BSHD, k_BSHD) / q_BSHD.shape[3] ** 0.5
    scores = torch.where(torch.tensor(allowed, device=scores.device), scores, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v_BSHD)


def relative(value: Tensor, expected: Tensor) -> float:
    """||value - expected|| / ||expected||. Where exactly zero is expected (dq and dk of a window of
    one position), the error is taken per element against the inputs, which are of size one."""
    value, expected = value.detach().double(), expected.detach()
    return float(
        (value - expected).norm()
        / (expected.norm() if expected.norm() > 0 else expected.numel() ** 0.5)
    )


def errors(
    backend: str,
    device: str,
    dtype: torch.dtype,
    seq_len: int,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    causal: bool = True,
) -> list[float]:
    """Relative errors of the output and, where the backend has gradients, of dq, dk, dv."""
    generator = torch.Generator().manual_seed(seq_len)
    shapes = [(2, seq_len, n, head_dim) for n in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, g = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    training = backend == "auto" or get_backend(backend).missing(torch.device(device)) is None
    inputs = [x.clone().requires_grad_(training) for x in (q, k, v)]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, backend=backend, window=window, causal=causal)
    expected = reference(exact[0], exact[1], exact[2], window, causal)
    assert out.shape == q.shape and out.dtype == dtype
    pairs = [(out, expected)]
    if training:
        got = torch.autograd.grad(out, inputs, g)
        pairs += zip(got, torch.autograd.grad(expected, exact, g.double()), strict=True)
    return [relative(value, exact_value) for value, exact_value in pairs]


# (sequence length, window): odd lengths; a window of one, small windows, one that reaches over all
# positions.
LENGTHS = [
    (1, None),
    (17, None),
    (129, None),
    (1, 1),
    (17, 1),
    (17, 5),
    (129, 40),
    (17, 17),
    (129, 500),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_cpu_backends_equal_the_definition(
    backend: str, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    for seq_len, window in LENGTHS:
        found = errors(backend, "cpu", dtype, seq_len, heads, 16, window)
        assert max(found) <= TOLERANCE[dtype], (seq_len, window, found)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_cpu_backends_attend_to_everything_without_the_causal_mask(
    backend: str, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    for seq_len in (1, 17, 129):
        found = errors(backend, "cpu", dtype, seq_len, heads, 16, None, causal=False)
        assert max(found) <= TOLERANCE[dtype], (seq_len, found)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
def test_cuda_backends_attend_to_everything_without_the_causal_mask(
    backend: str, heads: tuple[int, int]
) -> None:
    if backend != "auto" and (reason := available_backends("cuda")[backend]) is not None:
        pytest.skip(reason)
    torch._dynamo.reset()
    for seq_len in (17, 129, 512):
        found = errors(backend, "cuda", torch.bfloat16, seq_len, heads, 64, None, causal=False)
        assert max(found) <= TOLERANCE[torch.bfloat16], (seq_len, found)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
def test_cuda_backends_equal_the_definition(
    backend: str, heads: tuple[int, int], dtype: torch.dtype, head_dim: int
) -> None:
    if backend != "auto" and (reason := available_backends("cuda")[backend]) is not None:
        pytest.skip(reason)
    torch._dynamo.reset()  # FlexAttention compiles one kernel per shape
    ran = 0
    for seq_len, window in LENGTHS:
        case = Case(
            "cuda",
            dtype,
            head_dim,
            None if window is None or window >= seq_len else window,
            seq_len == 1,
        )
        if backend != "auto" and get_backend(backend).unsupported(case) is not None:
            with pytest.raises(UserError):
                errors(backend, "cuda", dtype, seq_len, heads, head_dim, window)
            continue
        found = errors(backend, "cuda", dtype, seq_len, heads, head_dim, window)
        assert max(found) <= TOLERANCE[dtype], (seq_len, window, found)
        ran += 1
    if not ran:
        pytest.skip(f"{backend} does not take {dtype}")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(("window", "causal"), [(None, True), (100, True), (None, False)])
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
def test_cuda_backends_compile_without_graph_breaks(
    backend: str, window: int | None, causal: bool
) -> None:
    try:
        resolve(backend, "cuda", torch.bfloat16, 64, 256, window, causal=causal, grouped=True)
    except (Unavailable, UserError) as error:
        pytest.skip(str(error))
    torch._dynamo.reset()
    q, k, v = (
        torch.randn(2, 256, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (4, 2, 2)
    )

    def call(*x: Tensor) -> Tensor:
        return attention(*x, backend=backend, window=window, causal=causal)

    out, expected = torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v)
    assert relative(out, expected.double()) <= 1e-2
    got, wanted = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    assert all(relative(a, b.double()) <= 1e-2 for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("backend", ["eager", "sdpa_math", "sdpa_flash"])
def test_float64(backend: str) -> None:
    assert max(errors(backend, "cpu", torch.float64, 33, (4, 2), 16, 7)) < 1e-12


def test_sdpa_kernels_are_pinned() -> None:
    """The operator that runs is the one that was asked for."""
    q, k, v = (torch.randn(1, 8, n, 16) for n in (4, 2, 2))
    for backend, operator in [
        ("sdpa_flash", "flash_attention_for_cpu"),
        ("sdpa_math", "attention_math"),
    ]:
        with torch.profiler.profile() as profile:
            attention(q, k, v, backend=backend)
        names = [
            event.key for event in profile.key_averages() if "_scaled_dot_product_" in event.key
        ]
        assert names and all(operator in name for name in names)


def test_available_backends_name_a_reason() -> None:
    found = available_backends("cpu")
    assert found["eager"] is None and found["sdpa_flash"] is None
    assert "cuda only" in str(found["sdpa_cudnn"]) and "no backward pass" in str(found["flex"])
    assert available_backends("cpu", training=False)["flex"] is None
    if not torch.cuda.is_available():
        assert "no" in str(available_backends("cuda")["fa4"])


EVERYTHING = dict.fromkeys(available_backends("cpu"))
half, full = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("case", "lacking", "expected"),
    [
        (Case("cuda", half, 128), (), "fa4"),
        (Case("cuda", half, 128), ("fa4",), "sdpa_cudnn"),
        (Case("cuda", half, 256), (), "fa3"),
        (Case("cuda", half, 128, None, True), ("fa4", "fa3", "fa2"), "sdpa_flash"),
        (Case("cuda", half, 128, 512), ("fa4", "fa3"), "fa2"),
        (Case("cuda", half, 128, 512), ("fa4", "fa3", "fa2"), "flex"),
        (Case("cuda", full, 128), (), "sdpa_efficient"),
        (Case("cuda", full, 128, 512), (), "flex"),
        (Case("cuda", torch.float64, 128), (), "sdpa_math"),
        (Case("cpu", full, 64), (), "sdpa_flash"),
        (Case("cpu", half, 64, 100), (), "sdpa_flash"),
        (Case("meta", full, 64), (), "sdpa_math"),
    ],
)
def test_choose(case: Case, lacking: tuple[str, ...], expected: str) -> None:
    assert choose(case, {**EVERYTHING, **dict.fromkeys(lacking, "not here")}) == expected


def test_choose_says_when_nothing_fits() -> None:
    with pytest.raises(Unavailable):
        choose(Case("cpu", full, 64), dict.fromkeys(EVERYTHING, "not here"))


def test_impossible_requests_are_refused_with_a_reason() -> None:
    q, k = torch.randn(1, 4, 4, 16), torch.randn(1, 4, 2, 16)
    with pytest.raises(UserError, match="unknown attention backend 'fa5'"):
        attention(q, k, k, backend="fa5")
    with pytest.raises(Unavailable, match="sdpa_cudnn exists for cuda only"):
        attention(q, k, k, backend="sdpa_cudnn")
    with pytest.raises(Unavailable, match="no backward pass on cpu"):
        attention(q.requires_grad_(), k, k, backend="flex")
    with pytest.raises(UserError, match="multiple"):
        attention(q, torch.randn(1, 4, 3, 16), torch.randn(1, 4, 3, 16))
    with pytest.raises(UserError, match="do not fit"):
        attention(q, k, torch.randn(1, 5, 2, 16))
    with pytest.raises(UserError, match="window"):
        attention(q, k, k, window=0)
    with pytest.raises(UserError, match="window=2 looks back"):
        attention(q, k, k, window=2, causal=False)


def test_unsupported_cases_on_cuda_name_what_is_supported() -> None:
    """Pure data, so it is checked without a GPU."""
    cases = itertools.product(
        ["sdpa_flash", "sdpa_cudnn", "fa2", "fa3", "fa4"], [Case("cuda", full, 64)]
    )
    assert all(
        "bfloat16, float16" in str(get_backend(name).unsupported(case)) for name, case in cases
    )
    assert "sliding window" in str(
        get_backend("sdpa_cudnn").unsupported(Case("cuda", half, 64, 16))
    )
    assert "multiples of 8" in str(get_backend("fa4").unsupported(Case("cuda", half, 60)))


def test_importing_imports_no_kernel_package() -> None:
    code = (
        "import sys, lsai_core.attention; print([m for m in sys.modules if "
        "m.startswith('flash_attn')])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_mask_made_in_inference_mode_serves_training_later() -> None:
    q = torch.randn(1, 9, 2, 16)
    with torch.inference_mode():
        attention(q, q, q, backend="flex", window=4)
    attention(q.clone(), q.clone(), q.clone(), backend="flex", window=4)


def test_a_length_recompiles_only_where_its_power_of_two_changes() -> None:
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda q: attention(q, q, q), backend=count, fullgraph=True)
    # up to 192 the nearest power of two is 128
    expected = {100: 1, 110: 1, 130: 1, 180: 1, 200: 2, 300: 2}
    for seq_len, graphs_by_now in expected.items():
        q = torch.randn(1, seq_len, 2, 16)
        torch._dynamo.mark_dynamic(q, 1)
        compiled(q)
        assert len(graphs) == graphs_by_now, seq_len
