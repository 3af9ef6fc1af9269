"""Stochastic rounding: its bits, what it leaves alone, and that kernels, shards and resumed runs
round alike."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rounding_job as job
import torch
from conftest import CHECKOUT, TINY_MODEL, losses, tiny
from test_checkpoint import resumed_as_never_stopped

from lsai_core.base.errors import Diverged, UserError
from lsai_core.config.train import OptimConfig
from lsai_core.optimizers.base import tensor_class
from lsai_core.optimizers.build import build_optimizer, clip_and_update, state_bytes
from lsai_core.optimizers.plain_update import plain_adamw_
from lsai_core.optimizers.rounding import LARGEST, Noise, philox, random_bits, rounded
from lsai_core.training import loop
from lsai_core.training.loop import train
from lsai_core.training.step import prepare_model, train_step
from lsai_lab.data import Dataset

CPU = torch.device("cpu")
MANY = 2**20  # samples: correlations of independent bits have a standard deviation of 0.001
JOB = CHECKOUT / "tests" / "rounding_job.py"
INF, NAN = math.inf, math.nan


def run(*command: str, **env: str) -> None:
    result = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the last bit; NaN has several patterns, any of which is equal to any."""
    return (
        a.dtype == b.dtype
        and torch.equal(a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5))
        and same_nan(a, b)
    )


def same_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())


def bits(count: int = MANY, **changes: Any) -> torch.Tensor:
    return random_bits(
        Noise(**{"seed": 0, "step": 1, "parameter": 0, "first": 0, **changes}), count, CPU
    ).double()


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a, b)))[0, 1])


def test_the_generator_gives_the_published_answers() -> None:
    """Known answers of Random123, the authors' own library."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, seed, rounds, words in (
        ((0,) * 4, 0, 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((ones,) * 4, 2**64 - 1, 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (pi, 0x299F31D0A4093822, 10, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        assert tuple(int(word) for word in philox(counter, seed, rounds)) == words


@pytest.mark.parametrize(
    "other",
    [
        {"parameter": 1},
        {"parameter": 199},
        {"step": 2},
        {"step": 3},
        {"step": 1001},
        {"seed": 1},
        {"seed": 2**32},
        {"first": MANY},
        {"first": 2**32},
        {"first": 2**33},
        {"first": 2**32 * 7 + MANY},
    ],
    ids=str,
)
def test_tensors_steps_seeds_and_shards_are_independent(other: dict[str, int]) -> None:
    a, b = bits(), bits(**other)
    assert abs(correlation(a, b)) < 1e-2
    up_a, up_b = (a >= 2**15).double(), (b >= 2**15).double()
    assert abs(correlation(up_a, up_b)) < 1e-2


def test_neighbours_are_independent_and_the_bits_uniform() -> None:
    x = bits()
    for lag in [*range(1, 18), 64, 256, 4096, 65536]:
        assert abs(correlation(x[:-lag], x[lag:])) < 1e-2, lag
    counts = torch.bincount((x / 256).long(), minlength=256).double()
    assert float(((counts - MANY / 256) ** 2 / (MANY / 256)).sum()) < 255 + 6 * math.sqrt(2 * 255)
    for bit in range(16):
        assert float(((x.long() >> bit) & 1).double().mean()) == pytest.approx(0.5, abs=3e-3)


@pytest.mark.parametrize("share", [0.0, 1 / 512, 0.25, 0.5, 0.9])
def test_the_mean_is_kept(share: float) -> None:
    gap = 2.0**-7  # between bf16 numbers from 1 to 2
    for sign in (1.0, -1.0):
        x = torch.full((MANY,), sign * (1 + share * gap))
        found = rounded(x, Noise(3, 1, 2)).double()
        assert set(found.unique().tolist()) <= {sign, sign * (1 + gap)}
        assert float((found - x.double()).mean()) / gap == pytest.approx(0.0, abs=3e-3)


def test_what_is_no_finite_number_of_bf16_is_left_as_rounding_to_nearest_has_it() -> None:
    beyond = [LARGEST * (1 + 2.0**-10), LARGEST * (1 + 2.0**-8.1), torch.finfo(torch.float32).max]
    kept = torch.tensor([NAN, INF, 0.0, LARGEST, *beyond, 1.0, 2.0**-133])
    # NaN whose only set bits would be cut off, or that a carry turns into zero
    strange = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000], dtype=torch.int32).view(
        torch.float32
    )
    for x in (kept, -kept, strange, -strange):
        many = x.repeat(4096)
        assert same(rounded(many, Noise(1, 1, 1)), many.to(torch.bfloat16))


def test_no_finite_number_of_bf16s_range_becomes_infinite() -> None:
    below = torch.tensor(LARGEST).view(torch.int32) - torch.arange(2**17, dtype=torch.int32)
    for sign in (1, -1):
        found = rounded(sign * below.view(torch.float32), Noise(1, 1, 1))
        assert found.isfinite().all() and float(found.abs().max()) == LARGEST


def test_parts_of_a_tensor_are_rounded_as_the_whole_is() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10_000, generator=generator)
    for start in (0, 2**32 - 5000):
        whole = rounded(x, Noise(5, 6, 7, start))
        for cuts in ([1, 9, 16, 7000], [8, 4096], [3333, 6666]):
            edges = [0, *cuts, len(x)]
            parts = [
                rounded(x[a:b], Noise(5, 6, 7, start + a)) for a, b in itertools.pairwise(edges)
            ]
            assert torch.equal(torch.cat(parts), whole)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(
                not importlib.util.find_spec("triton"), reason="Triton is not installed"
            ),
            id="interpreter",
        ),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
            ],
        ),
    ],
)
def from_kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[list[torch.Tensor]]:
    """Weights and moments after every case of the job, by Triton's interpreter or a GPU."""
    file = tmp_path_factory.mktemp("kernels") / "ends.pt"
    run(
        str(JOB),
        "kernels",
        request.param,
        str(file),
        **({"TRITON_INTERPRET": "1"} if request.param == "cpu" else {}),
    )
    return torch.load(file)


@pytest.mark.parametrize("number", range(len(job.CASES)), ids=lambda number: str(job.CASES[number]))
def test_the_kernels_compute_what_plain_operations_do(
    from_kernels: list[list[torch.Tensor]], number: int
) -> None:
    case = job.CASES[number]
    kernel = from_kernels[number]
    plain = job.updated(case, "cpu", lambda _eight: plain_adamw_)
    if case.exact or case.dtype == torch.float32:  # the interpreter may round a root the other way
        torch.testing.assert_close(kernel[0], plain[0], rtol=2**-22, atol=2**-24)
    else:
        assert same(kernel[0], plain[0])
    for a, b in zip(kernel[1:], plain[1:], strict=True):
        if not case.eight_bit:
            assert same(a, b)
        elif case.poison != "gradient":  # codes at the edge between two may go either way
            close = (
                (a.float() - b.float()).abs() <= 1e-6 * b.float()
                if a.dtype != torch.uint8
                else a == b
            )
            assert close.float().mean() > 0.99
    if case.poison == "gradient":
        assert kernel[0].isnan().any() and not kernel[0].isnan().all()


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_another_number_of_processes_rounds_alike(processes: int, tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    run(*launch, str(JOB), "sharded", str(tmp_path / "ends.pt"))
    ends = torch.load(tmp_path / "ends.pt")
    assert len(ends) == (4 if processes == 4 else 2)  # HSDP, too
    for name, found in ends.items():
        module = torch.nn.ParameterList([torch.nn.Parameter(p) for p in job.parameters()])
        job.steps(module, name.split()[0], lambda _, gradient: gradient)
        assert all(torch.equal(a, b) for a, b in zip(found, module.parameters(), strict=True)), name


def stochastic(**changes: Any) -> Any:
    return tiny(precision="bf16", device="cpu", **{"optim": {"rounding": "stochastic"}, **changes})


@pytest.mark.parametrize("states", ["full", "8bit"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_gradient_that_is_no_number_ends_the_run(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: float, states: str
) -> None:
    calls = []

    def poisoned(optimizer: torch.optim.Optimizer, limit: float) -> torch.Tensor:
        calls.append(None)
        if len(calls) == 3:
            optimizer.param_groups[0]["params"][1].grad[0, 0] = bad
        return clip_and_update(optimizer, limit)

    monkeypatch.setattr(loop, "train_step", functools.partial(train_step, update=poisoned))
    with pytest.raises(Diverged, match="not finite at step 3"):
        train(stochastic(optim={"rounding": "stochastic", "states": states}), dataset, tmp_path)


@pytest.mark.parametrize("states", ["full", "8bit"])
def test_resuming_equals_never_having_stopped(
    dataset: Dataset, tmp_path: Path, states: str
) -> None:
    config = stochastic(optim={"rounding": "stochastic", "states": states}, checkpoint={"every": 4})
    whole = resumed_as_never_stopped(config, dataset, tmp_path)
    other = train(
        config.model_copy(
            update={"optim": config.optim.model_copy(update={"rounding": "nearest"})}
        ),
        dataset,
        tmp_path / "nearest",
    )
    assert losses(tmp_path / "nearest") != losses(tmp_path / "whole")
    assert whole.optimizer == {
        "optimizer_kernel": "plain",
        "optimizer_rounding": "stochastic, 7 Philox rounds",
    }
    assert other.optimizer["optimizer_rounding"] == "nearest"


def exact_but(*rounded: str, **changes: Any) -> Any:
    return tiny(precision="bf16", device="cpu", optim={"rounded": rounded}, **changes)


def test_a_weight_that_is_not_rounded_moves_as_in_fp32() -> None:
    config = OptimConfig(lr=1e-4, weight_decay=0.0, rounded=("matrices",))
    names = ("embedding.weight", "blocks.0.norm.weight", "output.weight", "blocks.0.qkv.weight")
    start = torch.rand(len(names), 64, generator=torch.Generator().manual_seed(0)) + 1
    own = {name: torch.nn.Parameter(row.bfloat16()) for name, row in zip(names, start, strict=True)}
    full = torch.nn.ParameterList([torch.nn.Parameter(p.detach().float()) for p in own.values()])
    module = torch.nn.Module()
    optimizer = build_optimizer(module, config, parameters=own)
    other = torch.optim.AdamW(full, lr=1e-4, betas=config.betas, weight_decay=0.0)
    for step in range(100):
        for mine, theirs in zip(own.values(), full, strict=True):
            gradient = torch.ones(64) * (1 if step % 3 else -0.5)
            mine.grad, theirs.grad = gradient.bfloat16(), gradient
        optimizer.step()
        other.step()
    for name, theirs in zip(names, full, strict=True):
        kept = optimizer.state[own[name]].get("weight")
        if name == names[-1]:  # each update is less than half a step of bf16 above 1
            assert kept is None and torch.equal(own[name], start[-1].bfloat16())
            continue
        # the moments are in bf16
        torch.testing.assert_close(kept - theirs, torch.zeros(64), rtol=0, atol=3e-4)
        assert torch.equal(own[name], kept.bfloat16()) and (kept != own[name]).any()


def test_what_is_kept_in_fp32_is_predicted_and_resumed(dataset: Dataset, tmp_path: Path) -> None:
    config = exact_but("matrices", checkpoint={"every": 4})
    whole = resumed_as_never_stopped(config, dataset, tmp_path)
    named = dict(whole.model.named_parameters())
    exact = sum(p.numel() for name, p in named.items() if tensor_class(name) != "matrices")
    everything = sum(p.numel() for p in named.values())
    asked = (config.model, config.optim, torch.bfloat16)
    assert state_bytes(*asked) == 4 * exact + 2 * 2 * everything


def test_the_embedding_begins_as_asked(dataset: Dataset) -> None:
    for std in (1.0, 0.02):
        model = prepare_model(tiny(model=TINY_MODEL | {"embedding_std": std}), CPU)
        assert float(model.embedding.weight.std()) == pytest.approx(std, rel=0.05)


def test_lost_updates_are_counted_by_class(dataset: Dataset, tmp_path: Path) -> None:
    optim = {"lr": 1e-4, "warmup_steps": 0}
    config = tiny(
        precision="bf16", device="cpu", steps=10, optim=optim, profile={"lost_updates": 4}
    )
    rows = train(config, dataset, tmp_path / "nearest").rows
    counted = [row for row in rows if "lost_norms" in row]
    assert [row["step"] for row in counted] == [4, 8] and not counted[0]["steady"]
    # gains begin at 1, where bf16 has steps of 1/256 and 1/128; the embedding's size is 1
    assert all(row["lost_norms"] == 1 and row["lost_embedding"] > 0.5 for row in counted)
    assert all(0 < row["lost_matrices"] < row["lost_embedding"] for row in counted)
    exact = config.model_copy(update={"optim": config.optim.model_copy(update={"rounded": ()})})
    last = [row for row in train(exact, dataset, tmp_path / "exact").rows if "lost_norms" in row]
    assert all(row["lost_norms"] == 0 and row["lost_matrices"] < 0.01 for row in last)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision": "fp32", "optim": {"rounded": []}}, "needs precision bf16"),
        ({"optim": {"rounded": [], "states": "8bit"}}, "states 8bit has no such"),
        ({"optim": {"rounded": [], "kernel": "torch"}}, "use kernel auto or triton"),
        ({"optim": {"rounded": []}, "parallel": {"fsdp": 2}}, "no parallel"),
        ({"profile": {"lost_updates": 2}, "optim": {"states": "8bit"}}, "states full"),
    ],
)
def test_what_cannot_be_chosen_is_refused_in_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        tiny(**{"precision": "bf16", "device": "cpu", **changes})
    assert "\n" not in str(error.value)
