"""The attention study: what a run measures and keeps, the table that `auto` follows, and the
chapter on both."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHECKOUT

from lsai_core.attention import Case, attention, available_backends, choose
from lsai_core.attention.measured import TABLE, nearest, read_table, select_rankings, table_text
from lsai_core.base.errors import UserError
from lsai_core.base.files import write_json
from lsai_core.config.strict import validated
from lsai_lab.benches.attention import bench, errors
from lsai_lab.benches.attention.clock import Call, random_inputs
from lsai_lab.benches.attention.config import AttentionBenchConfig, Shape
from lsai_lab.benches.attention_table import attention_runs, choices_of, recorded_rankings
from lsai_lab.runs.kinds import Context, get_kind
from lsai_lab.runs.records import Run, RunId, Summary, find_runs, recorded_runs

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
CPU = torch.device("cpu")
SWEEPS = [
    {"measure": "error", "mask": "causal", "lengths": [32]},
    {"mask": "causal", "lengths": [16, 32]},
    {"mask": 8, "lengths": [32]},
    {"mask": "full", "lengths": [32]},
]


def config(**changes: Any) -> AttentionBenchConfig:
    base = {
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "dtype": "float32",
        "device": "cpu",
        "tokens": 64,
        "point_ms": 0.1,
    }
    return validated(AttentionBenchConfig, {**base, "sweeps": SWEEPS, **changes}, "test")


def execute(
    folder: Path, settings: AttentionBenchConfig
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Results and points of a run in `folder`."""
    results = get_kind("attention").function()(settings, Context(folder, folder, folder))
    return results, [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def timed(rows: list[dict[str, Any]], **values: Any) -> list[dict[str, Any]]:
    return [
        row
        for row in rows
        if row["measure"] == "time" and all(row[key] == v for key, v in values.items())
    ]


def test_a_run_measures_every_backend_that_there_is_and_says_what_is_missing(
    tmp_path: Path,
) -> None:
    results, rows = execute(tmp_path, config())
    states = {row["backend"]: row for row in rows if row["measure"] == "backend"}
    assert {name for name, row in states.items() if row["outcome"] == "ok"} == {
        "eager",
        "sdpa_math",
        "sdpa_flash",
    }
    assert (
        states["flex"]["outcome"] == "forward only"
        and "no backward pass" in states["flex"]["reason"]
    )
    assert states["fa4"]["outcome"] == "unavailable" and "cuda only" in states["fa4"]["reason"]
    assert len(timed(rows)) == 4 * 4 == results["points"] == results["points_ok"]
    (row,) = timed(rows, backend="eager", mask="causal", length=32)
    assert (
        row["training_ms_p25"] <= row["training_ms_p75"]
        and row["repeats"] >= 3
        and row["batch"] == 2
    )
    flops = 4 * 2 * 4 * 16 * 32 * 32 / 2
    assert row["forward_tflops"] == pytest.approx(flops / row["forward_ms"] / 1e9, rel=1e-3)
    assert row["training_tflops"] == pytest.approx(3.5 * flops / row["training_ms"] / 1e9, rel=1e-3)
    assert results["causal_32_eager_tflops"] == row["training_tflops"]
    scores_mib = 4 * 2 * 4 * 32 * 32 / 2**20
    assert row["memory_training_mib"] >= row["memory_forward_mib"] > scores_mib
    (fused,) = timed(rows, backend="sdpa_flash", mask="causal", length=32)
    assert fused["memory_training_mib"] < row["memory_training_mib"]
    (flex,) = timed(rows, backend="flex", mask="full")
    assert "backward_ms" not in flex and flex["forward_tflops"] > 0
    compared = [row for row in rows if row["measure"] == "error"]
    assert len(compared) == 4
    for row in compared:
        assert 0 < row["out"] <= 2 * row["bound_out"] < 1e-5, row
        assert ("dq" in row) == (row["backend"] != "flex")


def test_points_are_kept_as_they_are_measured_and_a_second_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = bench.measure, []

    def killed_at_the_fifth(*arguments: Any, **options: Any) -> dict[str, Any]:
        calls.append(arguments[0].backend)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(bench, "measure", killed_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path, config())
    path = tmp_path / "metrics.jsonl"
    kept = path.read_text()
    assert len(timed([json.loads(line) for line in kept.splitlines()])) == 4
    path.write_text(kept + '{"step": 99, "measure": "ti')  # torn by the kill
    _, rows = execute(tmp_path, config())
    assert len(timed(rows)) == 16 and [row["step"] for row in rows] == list(range(len(rows)))
    assert path.read_text().startswith(kept) and len(calls) == 5 + 12
    _, again = execute(tmp_path, config())
    assert again == rows and len(calls) == 17


def test_what_cannot_be_measured_is_a_point_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bench.measure

    def measure(call: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        if call.backend == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        if call.backend == "sdpa_math":
            raise RuntimeError("no kernel")
        row = real(call, *arguments, **options)
        return row | ({"training_ms": 900.0} if call.backend == "sdpa_flash" else {})

    monkeypatch.setattr(bench, "measure", measure)
    results, rows = execute(tmp_path, config(max_call_s=1.0))
    first, later = timed(rows, backend="eager", mask="causal")
    assert (
        first["outcome"] == later["outcome"] == "oom"
        and later["reason"] == "out of memory already at length 16"
    )
    assert {row["reason"] for row in timed(rows, backend="sdpa_math")} == {
        "RuntimeError: no kernel"
    }
    assert [row["outcome"] for row in timed(rows, backend="sdpa_flash", mask="causal")] == [
        "ok",
        "skipped",
    ]
    (slow,) = timed(rows, backend="sdpa_flash", mask="causal", length=32)
    assert slow["reason"] == "about 1.8 s a call expected, the limit is 1 s"
    assert results["points"] == 16 > results["points_ok"]


def test_the_budget_ends_a_run_in_good_order(tmp_path: Path) -> None:
    results, rows = execute(tmp_path, config(budget_s=1e-9))
    assert results["points_ok"] == 0 and {row["outcome"] for row in timed(rows)} == {"skipped"}
    assert "were over" in timed(rows)[0]["reason"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_run_on_a_gpu(tmp_path: Path) -> None:
    sweeps = [
        {"measure": "error", "mask": "causal", "lengths": [256]},
        {"mask": "causal", "lengths": [256, 512]},
        {"mask": 64, "lengths": [256]},
        {"mask": "full", "lengths": [256]},
    ]
    names = [name for name in available_backends("cuda") if name != "flex"]
    settings = config(
        device="cuda", dtype="bfloat16", head_dim=64, tokens=1024, backends=names, sweeps=sweeps
    )
    results, rows = execute(tmp_path, settings)
    assert results["compute_capability"] and results["points_ok"] > 0
    assert {row["outcome"] for row in timed(rows)} <= {"ok", "unsupported"}
    for row in rows:
        if row["measure"] == "error" and row["outcome"] == "ok":
            assert (
                max(row[name] / row[f"bound_{name}"] for name in ("out", "dq", "dk", "dv"))
                <= errors.ALLOWED_ERROR
            ), row
    (eager,), (fused,) = (
        timed(rows, backend=b, mask="causal", length=512) for b in ("eager", "sdpa_flash")
    )
    assert eager["memory_training_mib"] > fused["memory_training_mib"] > 0


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 5), (False, None)])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_exact_values_are_those_of_the_definition(
    kv_heads: int, causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against autograd through eager attention in float64 (which test_attention holds against the
    definition)."""
    shape = Shape(2, 23, 4, kv_heads, 8, causal, window)
    monkeypatch.setitem(errors._BLOCK_BYTES, "cpu", 7 * 8 * 2 * 4 * 23)  # seven rows at a time
    inputs = random_inputs(shape, torch.float32, CPU, 0)
    q, k, v = (x.double().requires_grad_() for x in inputs[:3])
    out = attention(q, k, v, backend="eager", window=window, causal=causal)
    wanted = [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3].double())]
    for value, expected in zip(errors.exact_attention(shape, inputs), wanted, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)
    found = errors.relative_errors(errors.eager_values(shape, inputs), wanted)
    assert list(found) == ["out", "dq", "dk", "dv"] and max(found.values()) < 1e-5


def test_flops_count_the_pairs_that_the_mask_lets_through() -> None:
    length, window = 512, 128
    pairs = {(True, None): 0, (True, window): 0, (False, None): length**2}
    for i in range(length):
        pairs[True, None] += i + 1
        pairs[True, window] += min(i + 1, window)
    for (causal, reach), count in pairs.items():
        shape = Shape(3, length, 8, 2, 64, causal, reach)
        assert shape.forward_flops == pytest.approx(
            4 * 3 * 8 * 64 * count, rel=1 / reach if reach else 1 / length
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "heads=4 is not divisible by kv_heads=3"),
        ({"backends": ["fa5"]}, "unknown attention backend 'fa5'"),
        (
            {"sweeps": [{"mask": 16, "lengths": [16]}]},
            "a window of 16 restricts nothing at length 16",
        ),
        ({"sweeps": [{"mask": "causal", "lengths": [32, 16]}]}, "must ascend"),
        ({"sweeps": [{"mask": "casual", "lengths": [32]}]}, "mask"),
        ({"hads": 4}, "unknown key 'hads' (did you mean 'heads' or 'kv_heads'?)"),
    ],
)
def test_bad_configs_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        config(**changes)
    assert message in str(error.value) and "\n" not in str(error.value)


# Milliseconds forward and backward of a synthetic GPU, by mask, window and length; `wrong` is fast
# and not correct.
TIMES = {
    ("causal", None, 512): {
        "fa4": (3.0, 5.0),
        "sdpa_cudnn": (2.0, 7.0),
        "fa2": (5.0, 9.0),
        "flex": (0.5, 0.5),
    },
    ("causal", None, 8192): {"fa4": (3.0, 5.0), "sdpa_cudnn": (4.0, 6.0), "fa2": (5.0, 9.0)},
    ("window", 512, 8192): {"fa4": (3.0, 5.0), "fa2": (2.0, 3.0)},
}


def write_gpu_run(
    root: Path,
    variant: str = "gqa128",
    name: str = "NVIDIA H200",
    started: str = "2026-01-01",
    repeat: int = 0,
    **heads: int,
) -> Run:
    """An attention run as a GPU would have recorded it: flex is too far from exact, eager was timed
    but not compared."""
    settings = config(
        **{"heads": 32, "kv_heads": 8, "head_dim": 128, **heads}, device="cuda", dtype="bfloat16"
    )
    names = ["fa4", "sdpa_cudnn", "fa2", "flex", "eager"]
    rows: list[dict[str, Any]] = [
        {"measure": "backend", "backend": b, "outcome": "ok", "reason": None} for b in names
    ]
    bound = {f"bound_{value}": 3e-3 for value in errors.NAMES}
    for mask, window in (("causal", None), ("window", 512)):
        for backend in names[:4]:
            found = dict.fromkeys(errors.NAMES, 2.9e-3) | (
                {"dk": 6.1e-3} if backend == "flex" else {}
            )
            place = {"mask": mask, "window": window, "length": 2048, "batch": 8, "backend": backend}
            rows.append(
                {
                    "measure": "error",
                    **place,
                    "outcome": "ok",
                    "reason": None,
                    **bound,
                    **found,
                    "first_call_s": 3.0,
                }
            )
    for (mask, window, length), by_backend in TIMES.items():
        place = {"mask": mask, "window": window, "length": length, "batch": 2}
        for backend, (forward, backward) in {**by_backend, "eager": (0.1, 0.1)}.items():
            row = {"measure": "time", **place, "backend": backend, "outcome": "ok", "reason": None}
            for kind, ms in (
                ("forward", forward),
                ("backward", backward),
                ("training", forward + backward),
            ):
                row |= {
                    f"{kind}_ms": ms,
                    f"{kind}_ms_p25": ms,
                    f"{kind}_ms_p75": ms,
                    f"{kind}_tflops": 500.0 / ms,
                }
            row |= {
                "repeats": 3,
                "first_call_s": 0.1,
                "memory_forward_mib": 64.0,
                "memory_training_mib": 100.0,
            }
            rows.append(row)
        no_memory = {"outcome": "oom", "reason": "CUDA out of memory. Tried to allocate 9 GiB"}
        rows.append({"measure": "time", **place, "backend": "fa3", **no_memory})
    run = RunId(
        "attention", variant, "kernels", repeat, f"{abs(hash((variant, name, started))):x}"[:12]
    )
    folder = root / "attention" / run.folder
    folder.mkdir(parents=True)
    results = {"device_name": name, "compute_capability": "9.0"}
    Summary(
        run, "attention", "ok", None, f"{started}T00:00:00+00:00", 1.0, "lsai", {}, results
    ).write(folder)
    write_json(folder / "config.json", settings.model_dump(mode="json"))
    write_json(
        folder / "env.json", {"machine": "h200", "gpu": name, "cpu": "a cpu", "cpu_cores": 16}
    )
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, **row}) + "\n" for i, row in enumerate(rows))
    )
    return find_runs(root)[-1]


def test_the_committed_table_is_what_the_records_give() -> None:
    found = table_text(recorded_rankings(recorded_runs(CHECKOUT / "reports")))
    assert TABLE.read_text() == found, "run `lsai attention-table --write`"


def test_records_become_rankings_of_what_is_correct(tmp_path: Path) -> None:
    write_gpu_run(tmp_path)
    rankings = recorded_rankings(find_runs(tmp_path))
    by_shape = {(r.causal, r.window, r.length): r for r in rankings}
    assert len(rankings) == 3
    short = by_shape[True, None, 512]
    assert (short.gpu, short.capability, short.head_dim, short.grouped) == (
        "NVIDIA H200",
        "9.0",
        128,
        True,
    )
    # flex errs in dk only, so it may serve inference; eager was not compared with float64, so it is
    # nowhere.
    assert [*short.training] == ["fa4", "sdpa_cudnn", "fa2"]
    assert [*short.inference] == ["flex", "sdpa_cudnn", "fa4", "fa2"]
    assert all(
        short.training[name] == 500 / sum(TIMES["causal", None, 512][name])
        for name in short.training
    )
    assert [*by_shape[True, 512, 8192].training] == ["fa2", "fa4"]
    assert read_table(table_text(rankings)) == tuple(rankings)
    assert read_table(table_text([])) == ()


def test_the_newest_run_counts_and_a_cpu_makes_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gpu_run(tmp_path)
    monkeypatch.setitem(TIMES, ("causal", None, 512), {"fa2": (1.0, 1.0)})
    write_gpu_run(tmp_path, started="2026-02-01")
    rankings = recorded_rankings(find_runs(tmp_path))
    assert len(rankings) == 3 and [*rankings[0].training] == ["fa2"]
    for path in tmp_path.rglob("summary.json"):
        text = path.read_text()
        assert '"compute_capability": "9.0"' in text
        path.write_text(text.replace('"compute_capability": "9.0"', '"compute_capability": null'))
    assert recorded_rankings(find_runs(tmp_path)) == []


def test_a_second_measurement_judges_the_table_and_is_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gpu_run(tmp_path)
    table = recorded_rankings(find_runs(tmp_path))
    monkeypatch.setitem(
        TIMES, ("causal", None, 512), {"fa2": (1.0, 1.0), "fa4": (2.0, 2.0), "flex": (4.0, 4.0)}
    )
    write_gpu_run(tmp_path, started="2026-02-01", repeat=1)
    assert recorded_rankings(find_runs(tmp_path)) == table
    (again,) = [run for run in find_runs(tmp_path) if run.summary.id.repeat]
    found = {(c["length"], c["purpose"]): c for c in choices_of(again.folder, table)}
    assert found[512, "training"]["chosen"] == "fa4" and found[512, "training"]["share"] == 0.5
    assert found[512, "inference"]["share"] == 0.25


EVERYTHING = dict.fromkeys(available_backends("cpu"))
half = torch.bfloat16


@pytest.mark.parametrize(
    ("case", "lacking", "expected"),
    [
        (Case("cuda", half, 128, grouped=True, length=512), (), "fa4"),
        (
            Case("cuda", half, 128, grouped=True, length=512, training=False),
            ("flex",),
            "sdpa_cudnn",
        ),
        (Case("cuda", half, 128, grouped=True, length=512), ("fa4",), "sdpa_cudnn"),
        # the nearest there is
        (Case("cuda", half, 128, grouped=False, length=256), ("fa4",), "sdpa_cudnn"),
        (Case("cuda", half, 128, window=400, grouped=True, length=4096), (), "fa2"),
        (Case("cuda", half, 64, window=4096, length=131072), (), "fa2"),
        # fa4 and cuDNN do not take this head dimension
        (Case("cuda", half, 256, grouped=True, length=512), (), "fa2"),
        # no such mask was measured: the fixed order
        (Case("cuda", half, 128, causal=False, length=512), (), "fa4"),
        (Case("cuda", torch.float32, 128, length=512), (), "sdpa_efficient"),
        (Case("cuda", torch.float16, 128, grouped=True, length=512), ("fa4",), "sdpa_cudnn"),
        (Case("cuda", half, 128, single_token=True, length=1), ("fa4",), "fa3"),
        (
            Case("cuda", half, 128, grouped=True, length=512),
            ("fa4", "sdpa_cudnn", "fa2", "fa3"),
            "sdpa_flash",
        ),
    ],
)
def test_auto_takes_the_fastest_of_the_nearest_shape(
    case: Case, lacking: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    write_gpu_run(tmp_path)
    measured = recorded_rankings(find_runs(tmp_path))
    assert choose(case, {**EVERYTHING, **dict.fromkeys(lacking, "not here")}, measured) == expected


def test_a_gpu_follows_its_own_model_else_its_architecture(tmp_path: Path) -> None:
    write_gpu_run(tmp_path)
    write_gpu_run(tmp_path, "mha64", "NVIDIA GH200", kv_heads=32, head_dim=64)
    measured = recorded_rankings(find_runs(tmp_path))
    assert {r.head_dim for r in select_rankings(measured, "NVIDIA GH200", "9.0")} == {64}
    assert {r.head_dim for r in select_rankings(measured, "NVIDIA H100", "9.0")} == {64, 128}
    assert select_rankings(measured, "NVIDIA B200", "10.0") == ()
    without_fa4 = replace(measured[0], gpu="NVIDIA H100", training={"sdpa_cudnn": 1.0})
    for usable, gpus in (
        ({"sdpa_cudnn"}, {"NVIDIA H100"}),
        ({"sdpa_cudnn", "fa4"}, {"NVIDIA H200", "NVIDIA GH200"}),
    ):
        chosen = select_rankings(
            [without_fa4, *measured], "NVIDIA H100", "9.0", dict.fromkeys(usable)
        )
        assert {ranking.gpu for ranking in chosen} == gpus, (
            "a GPU measured without a kernel does not pass it over"
        )
    found = nearest(Case("cuda", half, 64, length=700), measured)
    assert found is not None and (found.head_dim, found.length) == (64, 512)


def test_the_worth_of_auto_is_the_time_of_the_fastest_over_its_own(tmp_path: Path) -> None:
    run = write_gpu_run(tmp_path)
    fixed = {(c["length"], c["window"], c["purpose"]): c for c in choices_of(run.folder, ())}
    assert (
        fixed[512, None, "training"]["share"] == 1.0
        and fixed[512, None, "training"]["chosen"] == "fa4"
    )
    assert fixed[8192, 512, "training"]["share"] == pytest.approx(5 / 8)
    table = recorded_rankings([run])
    assert {c["share"] for c in choices_of(run.folder, table)} == {1.0}
    hidden = choices_of(run.folder, table, from_neighbours=True)
    by_shape = {(c["length"], c["window"], c["purpose"]): c for c in hidden}
    assert by_shape[8192, None, "inference"]["chosen"] == "flex"  # the ranking of length 512
    assert by_shape[8192, None, "inference"]["share"] is None  # which was not timed at this length
    # no other window: the fixed order
    assert by_shape[8192, 512, "training"]["share"] == pytest.approx(5 / 8)


def test_a_finished_call_leaves_no_memory_behind() -> None:
    """Inputs of one point that die while the next is measured would be taken off its peak."""
    shape = Shape(1, 8, 1, 1, 4, True)
    call = Call(
        "eager", shape, random_inputs(shape, torch.float32, torch.device("cpu"), 0), training=True
    )
    for one in call.passes:
        one()
    inputs = [weakref.ref(x) for x in call.qkv]
    gc.disable()
    try:
        del call, one
        assert [x() for x in inputs] == [None] * 3
    finally:
        gc.enable()


def test_committed_attention_records_pass_the_gate() -> None:
    """With records: `auto` has at least 97 % of the fastest backend's speed at every shape that was
    measured."""
    runs = [
        run
        for run in recorded_runs(CHECKOUT / "reports")
        if run.summary.results.get("compute_capability")
    ]
    found = [choice for run in attention_runs(runs) for choice in choices_of(run.folder)]
    if not found:
        pytest.skip("no attention run on a GPU is recorded yet")
    assert min(choice["share"] for choice in found if choice["share"] is not None) >= 0.97
