"""What long sequences need in one process: checkpointing that keeps attention, a feed-forward layer
in chunks, inputs on the host."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import gpu_bytes, tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lsai_core.base.errors import UserError
from lsai_core.config.train import TrainConfig
from lsai_core.context import ContextParallel
from lsai_core.model.feed_forward import swiglu_down, swiglu_mlp
from lsai_core.model.saved_inputs import HostInputs
from lsai_core.model.transformer import Transformer, build_model
from lsai_core.optimizers.build import build_optimizer
from lsai_core.prediction.memory import predict
from lsai_core.profiling.live_tensors import LiveTensors
from lsai_core.training import step

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
LEAN: dict[str, Any] = {"grad_checkpoint": "attention", "saved_inputs": "host", "mlp_chunk": 24}


class Counted(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name().partition(".")[0].rpartition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def steps(config: TrainConfig, device: str = "cpu", count: int = 3) -> list[Tensor]:
    """Loss and gradient norm of a few steps, (2,) each, and how often each operator ran in the
    last."""
    model = step.prepare_model(config, torch.device(device))
    optimizer = build_optimizer(model, config.optim)
    generator = torch.Generator().manual_seed(0)
    shape = (config.batch_size * config.grad_accum, config.seq_len + 1)
    found = []
    for _ in range(count):
        tokens = torch.randint(300, shape, generator=generator)
        found.append(
            step.train_step(
                model, optimizer, tokens[:, :-1], tokens[:, 1:], config, torch.device(device)
            )
        )
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"grad_checkpoint": "attention"},
        {"mlp_chunk": 24},
        {"grad_checkpoint": "full", "saved_inputs": "host"},
        LEAN,
        {**LEAN, "compile": True},
        {**LEAN, "inputs_on_gpu": 1},
        {**LEAN, "grad_accum": 2, "batch_size": 2},
        {"grad_checkpoint": "selective", "saved_inputs": "host", "compile": True},
    ],
    ids=str,
)
def test_steps_are_those_of_a_run_that_keeps_everything(changes: dict[str, Any]) -> None:
    for found, wanted in zip(steps(tiny(**changes)), steps(tiny()), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


def test_recomputation_repeats_what_it_should() -> None:
    layers, chunked = 2, "chunked_mlp"
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    for mode, attention, products in (
        ("full", 2, True),
        ("attention", 1, True),
        ("selective", 1, False),
    ):
        config = tiny(grad_checkpoint=mode, mlp_chunk=24, model={"n_layers": layers})
        model = step.prepare_model(config, torch.device("cpu"))
        tokens = torch.randint(300, (2, config.seq_len))
        with Counted() as forward:
            loss = model(tokens, tokens)
        with Counted() as backward:
            loss.backward()
        assert forward.calls[kernel] == layers
        assert backward.calls[kernel] == layers * (attention - 1), mode
        # The feed-forward layer is never run once more for its own sake; its backward pass computes
        # what it needs.
        assert forward.calls[chunked] == layers and backward.calls[chunked] == 0, mode
        assert backward.calls["chunked_mlp_backward"] == layers
        # Of the products in front of it, the one of query, key and value is repeated and, for the
        # norm, that of the output.
        gradients = 2 * 2 * layers
        assert (backward.calls["mm"] > gradients) == products, (mode, backward.calls)


@pytest.mark.parametrize(("mode", "repeated"), [("full", 2), ("attention", 0), ("selective", 0)])
def test_a_ring_is_not_repeated_where_its_results_are_kept(
    mode: Any, repeated: int, tmp_path: Path
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = build_model(tiny().model, tiny().attention, grad_checkpoint=mode)
        model.share_sequence(ContextParallel("zigzag", 32))
        tokens = torch.randint(300, (2, 32))
        loss = model(tokens, tokens)
        with Counted() as backward:
            loss.backward()
    finally:
        dist.destroy_process_group()
    assert (
        backward.calls["context_attend"] == repeated
        and backward.calls["context_attend_backward"] == 2
    )


@pytest.mark.parametrize("chunk", [1, 7, 30, 31])
def test_chunks_are_the_whole_layer(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 15, 12), (40, 12), (12, 20)]
    inputs = [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]
    x, gate_up, down = inputs
    gradient = torch.randn(2, 15, 12, generator=generator, dtype=torch.float64)
    whole, parts = swiglu_down(x @ gate_up.T, down), swiglu_mlp(x, gate_up, down, chunk)
    # the gradient kernel of SwiGLU works in fp32
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    wanted = torch.autograd.grad(whole, inputs, gradient)
    for found, expected in zip(torch.autograd.grad(parts, inputs, gradient), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_chunks_sum_weight_gradients_in_fp32_and_follow_autocast() -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate_up, down = (
        torch.randn(s, generator=generator) for s in ((1, 512, 16), (64, 16), (16, 32))
    )
    exact = [t.clone().requires_grad_() for t in (x, gate_up, down)]
    swiglu_down(exact[0] @ exact[1].T, exact[2]).square().mean().backward()
    half = [t.bfloat16().requires_grad_() for t in (x, gate_up, down)]
    swiglu_mlp(*half, 4).float().square().mean().backward()
    mixed = [t.clone().requires_grad_() for t in (x, gate_up, down)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = swiglu_mlp(*mixed, 4)
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    for wanted, found in [*zip(exact, half, strict=True), *zip(exact, mixed, strict=True)]:
        assert (
            wanted.grad is not None and found.grad is not None and found.grad.dtype == found.dtype
        )
        assert (found.grad.float() - wanted.grad).norm() <= 1e-2 * wanted.grad.norm()


def deep(grad_checkpoint: Any = "full", **changes: Any) -> tuple[Transformer, Tensor]:
    config = tiny(model={"n_layers": 6})
    model = build_model(config.model, config.attention, grad_checkpoint=grad_checkpoint, **changes)
    model.fuse()
    return model, torch.randint(300, (4, 32))


@pytest.mark.parametrize("on_host", [6, 4])
def test_inputs_wait_in_buffers_that_are_used_again(on_host: int) -> None:
    model, tokens = deep()
    wanted = {name: None for name, _ in model.named_parameters()}
    model(tokens, tokens).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    made: list[Tensor] = []

    def host_buffer(like: Tensor) -> Tensor:
        made.append(torch.empty_like(like))
        return made[-1]

    model.around_block = HostInputs(on_host, host_buffer).of_block
    for _ in range(3):
        model.zero_grad()
        model(tokens, tokens).backward()
    assert len(made) == on_host
    assert all(
        torch.equal(p.grad, wanted[name])
        for name, p in model.named_parameters()
        if p.grad is not None
    )
    with torch.no_grad():
        model(tokens, tokens)
    first, second = (model(tokens, tokens) for _ in range(2))  # two that wait at the same time
    assert len(made) == 2 * on_host
    model.zero_grad()
    second.backward()
    first.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, 2 * wanted[name])


def test_what_the_device_holds_does_not_grow_with_the_layers() -> None:
    """Counted on a CPU without what was copied to the host, which here is of the same kind."""
    held: dict[tuple[int, int], int] = {}
    for layers in (2, 6):
        for host in (0, layers - 1, layers):
            config = tiny(model={"n_layers": layers})
            model = build_model(config.model, config.attention, grad_checkpoint="full")
            model.fuse()
            tokens = torch.randint(300, (4, 32))
            buffers: list[Tensor] = []
            if host:

                def host_buffer(like: Tensor, buffers: list[Tensor] = buffers) -> Tensor:
                    buffers.append(torch.empty_like(like))
                    return buffers[-1]

                model.around_block = HostInputs(host, host_buffer).of_block
            with LiveTensors() as live:
                before = sum(p.numel() * 4 for p in model.parameters())
                loss = model(tokens, tokens)
                waiting = live.live - before - sum(b.nbytes for b in buffers)
            held[layers, host] = waiting
            del loss
    one = 4 * 32 * tiny().model.d_model * 4
    assert held[6, 0] - held[2, 0] >= 4 * one
    # Of those that leave, the last one is held until the next block begins or the backward pass;
    # here it or the one that stays.
    assert held[6, 6] == held[2, 2] == held[6, 5] == held[2, 1]


def saved_by(loss: Tensor, model: Transformer) -> int:
    """Bytes that compiled blocks keep for the backward pass, beside the model's parameters."""
    known = {p.untyped_storage()._cdata for p in model.parameters()}
    found: dict[int, int] = {}
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        if "Compiled" in type(node).__name__:
            # PyTorch since 2.12 keeps what a graph made itself beside what autograd saves for it.
            for tensor in (
                *node.saved_tensors,
                *(getattr(node, "_tensors_no_vc_check", None) or ()),
            ):
                found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(size for storage, size in found.items() if storage not in known)


@pytest.mark.parametrize(("mode", "most"), [("full", 1.2), ("attention", 2.3)])
def test_compiled_blocks_keep_no_more_than_they_say(mode: str, most: float) -> None:
    """PyTorch 2.11 kept the results of both norms, too: what an autograd.Function computes was not
    marked for recomputation."""
    config = tiny(
        grad_checkpoint=mode,
        compile=True,
        mlp_chunk=24,
        seq_len=32,
        model={"n_layers": 3, "d_model": 256, "n_heads": 2, "n_kv_heads": 2},
    )
    model = step.prepare_model(config, torch.device("cpu"))
    tokens = torch.randint(300, (4, 32))
    kept = saved_by(model(tokens, tokens), model)
    inputs = 3 * 4 * 32 * 256 * 4
    assert inputs <= kept <= most * inputs, kept / inputs


def test_inputs_that_no_host_could_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(grad_checkpoint="full", saved_inputs="host")
    one = 4 * 32 * config.model.d_model * 4 / 2**30
    assert predict(config).host == pytest.approx(config.model.n_layers * one)
    assert predict(config.model_copy(update={"inputs_on_gpu": 1})).host == pytest.approx(one)
    monkeypatch.setattr("lsai_core.model.saved_inputs.host_limit_gib", lambda: 1.7 * one)
    with pytest.raises(MemoryError, match="saved_inputs: host needs"):
        step.prepare_model(config, torch.device("cpu"))


def test_inputs_that_stay_are_predicted_on_the_gpu() -> None:
    """Early in the backward pass they are all there, late none is: few of them raise no peak."""
    base: dict[str, Any] = {
        "model": {"n_layers": 8},
        "seq_len": 2048,
        "grad_checkpoint": "full",
        "mlp_chunk": 64,
    }
    one = 4 * 2048 * tiny().model.d_model * 4 / 2**30
    found = {k: predict(tiny(**base, saved_inputs="host", inputs_on_gpu=k)) for k in (0, 4, 7)}
    everything = predict(tiny(**base))
    assert [found[k].host for k in found] == pytest.approx([8 * one, 4 * one, one])
    assert found[0].peak < found[4].peak < found[7].peak <= everything.peak
    assert found[7].peak - found[4].peak == pytest.approx(3 * one, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inputs_on_gpu": 1}, "with saved_inputs gpu all are"),
        ({"inputs_on_gpu": 2, **LEAN}, "leaves nothing for the host: the model has 2 layers"),
    ],
)
def test_inputs_on_gpu_is_refused_where_it_means_nothing(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        tiny(**changes)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_steps_on_a_gpu(precision: str, compiled: bool) -> None:
    """Copies on another stream change no value; the device holds less, by the inputs of the blocks
    that wait."""
    shape = {
        "model": {"n_layers": 8, "d_model": 512, "n_heads": 8, "n_kv_heads": 8, "d_ff": 1024},
        "seq_len": 8192,
    }
    base = {
        **shape,
        "device": "cuda",
        "precision": precision,
        "compile": compiled,
        "grad_checkpoint": "full",
    }
    found, peaks = {}, {}
    some = {"saved_inputs": "host", "inputs_on_gpu": 3}
    for where, changes in {
        "gpu": {},
        "again": {},
        "some": some,
        "host": {"saved_inputs": "host"},
    }.items():
        held = gpu_bytes()
        torch.cuda.reset_peak_memory_stats()
        found[where] = torch.stack(steps(tiny(**base, **changes), "cuda", 6)).double()
        peaks[where] = torch.cuda.max_memory_allocated() - held
    off = {where: float((values / found["gpu"] - 1).abs().max()) for where, values in found.items()}
    assert off["again"] < 1e-2  # sums by atomic additions differ from run to run
    assert max(off["some"], off["host"]) <= max(1e-4, 4 * off["again"]), off
    # The predicted differences are five inputs each: late in the backward pass none is there, and
    # all gradients are.
    one = 4 * 8192 * 512 * (2 if precision == "bf16" else 4)
    assert peaks["gpu"] - peaks["host"] >= 4 * one
    assert peaks["host"] <= peaks["some"] <= peaks["gpu"] - 4 * one


@pytest.mark.gpu
@needs_cuda
def test_chunks_on_a_gpu() -> None:
    x, gate_up, down = (
        torch.randn(s, device="cuda") * 0.1 for s in ((1, 4100, 256), (1024, 256), (256, 512))
    )
    results = []
    for chunk in (None, 1024, 4100):
        half = [t.bfloat16().requires_grad_() for t in (x, gate_up, down)]
        out = (
            swiglu_down(half[0] @ half[1].T, half[2]) if chunk is None else swiglu_mlp(*half, chunk)
        )
        results.append([out, *torch.autograd.grad(out, half, torch.ones_like(out))])
    for found in results[1:]:
        for value, expected in zip(found, results[0], strict=True):
            assert (value.float() - expected.float()).norm() <= 1e-2 * expected.float().norm()
