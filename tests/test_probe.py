"""The passport of a machine: measured by `lsai probe`, taken by predictions and plans, refused
where it is none or another device's."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import CHECKOUT, Project
from test_bad_input import refused

import lsai_lab as lab
from lsai_core.base.files import read_jsonl
from lsai_core.config.strict import deep_merge
from lsai_core.config.train import TrainConfig
from lsai_core.prediction.roofline import estimate
from lsai_core.prediction.speeds import measured
from lsai_core.profiling.gpus import find_gpu, passport_gpu
from lsai_core.profiling.passport import MOST_BYTES, read_passport
from lsai_lab.predictions.asked import Source
from lsai_lab.predictions.passport_told import passport_name
from lsai_lab.predictions.passports import passport_of, write_passport
from lsai_lab.predictions.will_fit import timed, will_fit
from lsai_lab.runs.records import recorded_runs

TINY = ["--model", "lab-tiny", "--set", "compile=false", "--set", "precision=fp32"]
TINY += ["--set", "seq_len=128"]
H100 = {
    "kind": "gpu",
    "name": "NVIDIA H100 80GB HBM3",
    "count": 4,
    "memory_gib": 79.2,
    "capability": "9.0",
    "uuids": ["GPU-12345678-1234-1234-1234-123456789012"],
    "torch": "2.11.0+cu130",
    "host_cpu": "AMD EPYC 9654 96-Core Processor",
    "host_cores": 26,
    "host_threads": 26,
    "host_memory_gib": 200.0,
}


@pytest.fixture
def project() -> Project:
    return Project(CHECKOUT)


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The passport of a short probe of the CPU that was interrupted in its second part, and what
    the rest of the probe said."""
    path, project = tmp_path_factory.mktemp("probe") / "cpu.json", Project(CHECKOUT)
    words = ("probe", "--device", "cpu", "--out", path)
    first, said = project.start(*words), ""
    assert first.stderr is not None
    while "attention" not in said:
        said = first.stderr.readline()
        assert said, "it ended before its second part"
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=240)
    assert first.returncode == 130 and "goes on from there" in said, said
    assert not path.exists()
    second = project.start(*words, "--seconds", 12)
    _, said = second.communicate(timeout=240)
    assert second.returncode == 0, said
    assert [*path.parent.iterdir()] == [path]
    return path, said


def test_a_probe_measures_this_cpu_and_goes_on_where_it_was_interrupted(
    probed: tuple[Path, str],
) -> None:
    path, said = probed
    passport = read_passport(path)
    assert "products and copies" not in said and "attention, 4 heads of 64" in said
    assert path.stat().st_size <= MOST_BYTES
    assert (passport.device.kind, passport.device.name) == ("cpu", passport.device.host_cpu)
    assert passport.rates.fp32 and passport.rates.copy_gb_per_s > 0
    rows = [row for row in passport.attention if row.head_dim == 64]
    assert rows and all("sdpa_flash" in row.inference for row in rows)


def test_a_prediction_takes_the_rates_of_the_passport(
    probed: tuple[Path, str], project: Project, tmp_path: Path
) -> None:
    path, _ = probed
    data = json.loads(path.read_text())
    slow = {"copy_gb_per_s": data["rates"]["copy_gb_per_s"] / 10}
    slow["fp32"] = [[size, rate / 10] for size, rate in data["rates"]["fp32"]]
    slower = tmp_path / "slower.json"
    slower.write_text(json.dumps(deep_merge(data, {"rates": slow})))
    rows = []
    for passport in (path, slower):
        code, out, err = project.lsai("predict", *TINY, "--passport", passport, "--json")
        assert code == 0, err
        (row,) = json.loads(out)["gpus"]
        device = data["device"]["name"]
        assert row["GPU"] == device and row["memory GiB"] == data["device"]["memory_gib"]
        told = f"rates of the passport {passport}, of {device}, {data['measured']}"
        assert row["rates"] == told + ", while other work disturbed it" * bool(data["disturbed"])
        rows.append(row)
    assert rows[1]["step s"] > 1.2 * rows[0]["step s"] > 0
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(data | {"attention": [], "costs": {}}))
    code, out, _ = project.lsai("predict", *TINY, "--passport", bare, "--json")
    assert code == 0 and json.loads(out)["gpus"][0]["step s"] > 0, "attention as products"
    answer = lab.predict("lab-tiny", "cpu", passport=path, overrides={"compile": False})
    assert "of tensors" in project.lsai("predict", *TINY, "--gpu", "cpu", "--passport", path)[1]
    assert answer.gpus["rates"][0] == rows[0]["rates"] and answer.fits


def test_a_passport_is_refused_for_another_device(
    probed: tuple[Path, str], project: Project
) -> None:
    path, _ = probed
    predict = ("predict", *TINY, "--passport", path)
    refused(project.lsai(*predict, "--gpu", "h100"), "is the passport of .*, not of h100")
    refused(project.lsai(*predict, "--largest-batch"), "of a CPU; the largest is found for GPUs")
    refused(project.lsai(*predict, "--as", "hf"), "no time is predicted of other trainers")
    plan = ("plan", "--model", "lab-tiny", "--tokens", 4096, "--passport", path)
    refused(project.lsai(*plan), "of a CPU; plans are made for GPUs")
    refused(project.lsai("predict", *TINY, "--gpu", "cpu"), "known by its passport: `lsai probe`")


DAMAGED: dict[str, Any] = {
    "rates.copy_gb_per_s: Input should be greater than 0": {"rates": {"copy_gb_per_s": -1.0}},
    "rates.fp32.0.1: Input should be a finite number": {"rates": {"fp32": [[1.0, float("nan")]]}},
    "the sizes of products must ascend": {"rates": {"fp32": [[2.0, 1.0], [1.0, 1.0]]}},
    "device.name: String should match pattern": {"device": {"name": "<b>\n\x1b[2J"}},
    "rates.speed: Extra inputs are not permitted": {"rates": {"speed": 1.0}},
    "passport: Input should be 1": {"passport": 2},
    "attention.0.training.a b": {
        "attention": [
            {"head_dim": 64, "length": 8, "training": {"a b": 1.0}, "inference": {"eager": 1.0}}
        ]
    },
}


@pytest.mark.parametrize("told", DAMAGED)
def test_a_damaged_passport_is_one_line(
    told: str, probed: tuple[Path, str], project: Project, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(deep_merge(json.loads(probed[0].read_text()), DAMAGED[told])))
    refused(project.lsai("predict", *TINY, "--passport", path), f"is no passport of .*{told}")


def test_what_is_no_file_of_a_passport_is_one_line(project: Project, tmp_path: Path) -> None:
    path = tmp_path / "passport.json"
    for text in ("", "{", "[" * 10_000, "[]", '"\\ud800"', "\0" * 100, " " * 2 * MOST_BYTES):
        path.write_text(text)
        refused(project.lsai("predict", *TINY, "--passport", path), "is no passport of a machine")
        refused(project.lsai("probe", "--share", "--out", path), "is no passport of a machine")
    path.unlink()
    refused(project.lsai("predict", *TINY, "--passport", path), "there is no such file")
    os.mkfifo(path)
    refused(project.lsai("predict", *TINY, "--passport", path), "it is no plain file")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    """What a probe finds, by the records of an H100."""
    found: dict[str, Any] = {}
    for run in recorded_runs(CHECKOUT / "reports"):
        kind, results = run.summary.kind, run.summary.results
        if run.machine == "h100" and run.summary.id.repeat == 0:
            if kind == "ceilings":
                found["ceilings"] = results
            elif kind == "gemm":
                found["products"] = {"rows": read_jsonl(run.folder / "metrics.jsonl")}
            elif kind == "attention":
                name = f"attention-{run.summary.id.variant}"
                found[name] = {"config": run.config, "results": results, "rows": run.rows}
    return found


def config_of(model: str, changes: dict[str, Any] | None = None) -> TrainConfig:
    return Source(model=model).run(find_gpu("h100"), None, changes or {}).config


def passport_file(path: Path, found: dict[str, Any]) -> Path:
    passport = passport_of(H100, found, day="2026-11-27", seconds=200.0, disturbed=None)
    write_passport(path, passport)
    assert path.stat().st_size <= MOST_BYTES
    return path


def test_a_passport_of_the_records_predicts_what_the_tables_do(
    recorded: dict[str, Any], tmp_path: Path
) -> None:
    """The predictor has one way: the same measurements give the same time through either."""
    own = passport_gpu(passport_file(tmp_path / "h100.json", recorded))
    table = find_gpu("h100")
    assert asdict(own) == asdict(table) | {
        "passport": own.passport,
        "passport_file": str(tmp_path / "h100.json"),
    }
    assert own.passport and own.passport.rates.bf16 == measured()["rates"][H100["name"]]["bf16"]
    for model, kernel, changes in (
        ("llama3.2-1b", "sdpa_cudnn", {}),
        ("llama3.2-1b", None, {"attention": {"window": 1024}, "grad_checkpoint": "full"}),
        ("lab", None, {"precision": "fp32", "compile": False}),
        ("lab", "sdpa_flash", {"fp8": {"recipe": "fused"}}),
    ):
        config = config_of(model, changes)
        known, found = timed(config, table, kernel), timed(config, own, kernel)
        assert found["step s"] == pytest.approx(known["step s"], rel=1e-6), (model, changes)
        assert found["rates"].startswith("rates of the passport "), found
    (row,) = will_fit(config_of("llama3.2-1b"), [own])["gpus"]
    assert row["attention"] == "fa4", "its package was there"


def test_host_and_messages_of_a_passport_change_the_time(
    recorded: dict[str, Any], tmp_path: Path
) -> None:
    """A host of half the speed doubles a small model's step; slow messages bound a sharded one."""
    step = {"step_s": 0.02, "attention": "sdpa_cudnn"}
    slower = {**step, "step_s": 0.04}
    rows = [
        {
            "operation": operation,
            "bytes": 2**size,
            "outcome": "ok",
            "beside": beside,
            "bus_gb_per_s": 3.0 if beside else 4.0,
            "product_slowdown": 1.25,
        }
        for operation in ("all_gather", "reduce_scatter")
        for size in (20, 28)
        for beside in (False, True)
    ]
    fast = passport_gpu(passport_file(tmp_path / "fast.json", {**recorded, "step-call": step}))
    more = {"step-call": slower, "messages": {"rows": rows}}
    slow = passport_gpu(passport_file(tmp_path / "slow.json", recorded | more))
    small = config_of("lab-tiny", {"compile": False, "seq_len": 64})
    one, two = estimate(small, fast, "sdpa_cudnn"), estimate(small, slow, "sdpa_cudnn")
    assert one and two and two.step_s == pytest.approx(2 * one.step_s, rel=0.01)
    large = config_of("llama3.2-1b", {"parallel": {"fsdp": 4}})
    linked, waiting = estimate(large, fast, "fa4"), estimate(large, slow, "fa4")
    assert linked and waiting
    assert linked.source == f"{waiting.source}, exchanges by the data sheet".replace("slow", "fast")
    ratio = find_gpu("h100").link_gb_per_s / 4.0
    assert waiting.communication_s == pytest.approx(ratio * linked.communication_s)
    slowed = waiting.products_s - linked.products_s
    assert slowed == pytest.approx(0.2 * 4 / 3 * waiting.communication_s)
    assert waiting.step_s >= waiting.communication_s > linked.step_s


def test_a_plan_takes_the_rates_of_the_passport(
    recorded: dict[str, Any], project: Project, tmp_path: Path
) -> None:
    path = passport_file(tmp_path / "h100.json", recorded)
    words = ("--model", "lab-tiny", "--seq-len", 512, "--tokens", 2048, "--budget", 0.5)
    code, out, err = project.lsai("plan", *words, "--passport", path, "--json")
    assert code == 0 and f"rates of the passport {path}" in out, err
    refused(project.lsai("plan", *words, "--gpu", "h200", "--passport", path), "not of h200")


COMMITTED = sorted((CHECKOUT / "reports" / "passports").glob("*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=[path.stem for path in COMMITTED])
def test_a_committed_passport_can_be_read_and_is_called_after_its_machine(path: Path) -> None:
    assert path.name == passport_name(read_passport(path))


def test_sharing_shows_a_file_and_sends_nothing(
    recorded: dict[str, Any], project: Project, tmp_path: Path
) -> None:
    path = passport_file(tmp_path / "h100.json", recorded)
    before = path.read_bytes()
    code, out, _ = project.lsai("probe", "--share", "--out", path)
    assert code == 0 and path.read_bytes() == before
    assert "reports/passports/h100x4.json" in out and "Nothing was sent." in out
    compared = [line for line in out.splitlines() if line.startswith("  products in bf16")]
    assert len(compared) == 1 and compared[0].endswith("+0.0%")
    refused(project.lsai("probe", "--share", "--seconds", 5), "--share and --seconds contradict")
    refused(project.lsai("probe", "--out", tmp_path), "is a folder; name a file in it")
