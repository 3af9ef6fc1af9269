"""The search for the largest size: exact against brute force, few tries, and on a CPU with real
processes and memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from conftest import CHECKOUT, tiny

from lsai_core.base.files import read_jsonl
from lsai_core.config.strict import deep_merge, flatten
from lsai_core.config.train import TrainConfig
from lsai_lab.runs.kinds import Context
from lsai_lab.runs.study import load_profile, load_study, resolve, study_names
from lsai_lab.searches.batch_search import run
from lsai_lab.searches.config import BatchSearchConfig
from lsai_lab.searches.search import search_largest


class Machine:
    """A machine where everything up to `largest` works."""

    def __init__(self, largest: int) -> None:
        self.largest, self.sizes = largest, list[int]()

    def works(self, size: int) -> bool:
        self.sizes.append(size)
        return size <= self.largest


def test_the_answer_is_exact_wherever_it_begins() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        limit = rng.choice([1, 2, 3, 17, 1000, 1 << 16])
        largest, start = rng.randint(0, limit + 5), rng.randint(1, 2 * limit)
        machine = Machine(largest)
        assert search_largest(machine.works, start=start, limit=limit) == min(largest, limit)
        assert len(set(machine.sizes)) == len(machine.sizes), "the same size was tried twice"
        assert all(1 <= size <= limit for size in machine.sizes)
        # Doubling and bisection take at most 2 log2(limit); small first steps may not cost much
        # more.
        assert len(machine.sizes) <= 2 * limit.bit_length() + 8, (
            limit,
            largest,
            start,
            machine.sizes,
        )


@pytest.mark.parametrize("resolution", [0.03, 0.25])
def test_resolution_bounds_the_error_and_saves_tries(resolution: float) -> None:
    rng = random.Random(1)
    for _ in range(200):
        machine, exact = Machine(largest := rng.randint(100, 50_000)), Machine(largest)
        found = search_largest(machine.works, start=8, limit=1 << 20, resolution=resolution)
        search_largest(exact.works, start=8, limit=1 << 20)
        assert largest / (1 + resolution) - 1 <= found <= largest
        assert len(machine.sizes) < len(exact.sizes)


@pytest.mark.parametrize("largest", [97, 100, 104, 130, 3])
def test_a_good_prediction_makes_it_short_and_a_bad_one_does_no_harm(largest: int) -> None:
    machine = Machine(largest)
    found = search_largest(machine.works, start=100, limit=1 << 20, resolution=0.02)
    assert largest / 1.02 - 1 <= found <= largest
    assert len(machine.sizes) <= (5 if abs(largest - 100) < 5 else 14)


def test_edges() -> None:
    nothing = Machine(0)
    assert search_largest(nothing.works, start=64, limit=100) == 0 and nothing.sizes[-1] == 1
    assert search_largest(Machine(10**9).works, start=1, limit=100) == 100
    assert search_largest(Machine(5).works, start=4096, limit=1 << 20) == 5
    assert search_largest(Machine(1).works, start=1, limit=1) == 1


LIMIT_GIB = 0.12


@pytest.fixture(autouse=True)
def tries_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def search(tmp_path: Path, **changes: object) -> dict:
    train = tiny(model={"n_layers": 1, "d_model": 256}, seq_len=64)
    config = BatchSearchConfig.model_validate(
        {"train": train, "cpu_limit_gib": LIMIT_GIB, **changes}
    )
    return run(config, Context(tmp_path, tmp_path, tmp_path))


@pytest.mark.slow
def test_the_found_batch_really_trains_and_the_next_one_does_not(tmp_path: Path) -> None:
    found = search(tmp_path, resolution=0.1)
    largest, outcomes = found["largest_batch"], {t["size"]: t["outcome"] for t in found["tries"]}
    assert largest > 1 and not found["search_capped"] and not found["search_out_of_time"]
    assert outcomes[largest] == "ok" and set(outcomes.values()) <= {"ok", "oom"}
    assert (
        largest
        < min(size for size, outcome in outcomes.items() if outcome == "oom")
        <= 1.1 * largest + 1
    )
    assert read_jsonl(tmp_path / "metrics.jsonl") == found["tries"]
    again = search(tmp_path, max_size=largest)
    assert (again["largest_batch"], again["search_capped"]) == (largest, True)


def test_nothing_fits_is_an_answer(tmp_path: Path) -> None:
    found = search(tmp_path, cpu_limit_gib=0.0001)
    assert found["largest_batch"] == 0
    assert {t["outcome"] for t in found["tries"]} == {"oom"}


def test_a_try_that_hangs_ends_as_a_timeout(tmp_path: Path) -> None:
    found = search(tmp_path, max_size=2, steps=10**6, try_timeout_s=1.0)
    assert [t["outcome"] for t in found["tries"]] == ["timeout", "timeout"]
    assert found["largest_batch"] == 0


# What a search may leave out of its row's config: these change what is learned, or what is written
# down, and no step's memory.
NO_MEMORY = {
    "init_from",
    "steps",
    "seed",
    "log_every",
    "data.source",
    "data.column",
    "data.tokenizer",
    "data.max_mb",
    "data.tokenizer_mb",
    "data.split_seed",
    "optim.lr",
    "optim.min_lr_ratio",
    "optim.warmup_steps",
    "optim.betas",
    "optim.eps",
    "optim.weight_decay",
}
NO_MEMORY_SECTIONS = ("eval.", "profile.", "checkpoint.")
PROFILES = sorted(path.stem for path in (CHECKOUT / "params" / "profiles").glob("*.yaml"))


@pytest.mark.parametrize("profile", PROFILES)
def test_every_search_trains_what_its_row_trains(profile: str) -> None:
    laid_over, compared = load_profile(CHECKOUT, profile), 0
    for name in study_names(CHECKOUT):
        study = load_study(CHECKOUT, name, laid_over)
        for part, spec in study.parts.items():
            if spec.kind not in ("batch_search", "model_search"):
                continue
            for variant in study.measured(part):
                row = TrainConfig.model_validate(
                    deep_merge(study.base, study.variants[variant].config)
                )
                searched: Any = resolve(study, variant, part, 0, {})
                before, after = (
                    flatten(config.model_dump(mode="json")) for config in (row, searched.train)
                )
                other = {key for key in before | after if before.get(key) != after.get(key)}
                sought = {"batch_size"} if spec.kind == "batch_search" else set()
                assert {
                    key for key in other if not key.startswith(NO_MEMORY_SECTIONS)
                } <= NO_MEMORY | sought, variant
                compared += 1
    assert compared


def test_a_search_leaves_out_no_setting_of_the_step() -> None:
    row = tiny(
        loss="full",
        blocks="plain",
        precision="bf16",
        grad_accum=3,
        grad_checkpoint="full",
        saved_inputs="host",
        inputs_on_gpu=1,
        optim={"states": "8bit", "grad_clip": 0.0},
    )
    searched = BatchSearchConfig.model_validate(
        BatchSearchConfig.from_study(row.model_dump(mode="json"), {})
    ).train
    for name in (
        "loss",
        "blocks",
        "precision",
        "grad_accum",
        "grad_checkpoint",
        "saved_inputs",
        "inputs_on_gpu",
    ):
        assert getattr(searched, name) == getattr(row, name)
    assert (searched.optim.states, searched.optim.grad_clip) == ("8bit", 0.0)
