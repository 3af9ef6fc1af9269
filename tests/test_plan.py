"""What should I run? The fastest setting that fits: beside all settings, in files, as a command."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import plan_tasks
import pytest
from conftest import CHECKOUT, Project

import lsai_lab as lab
from lsai_core.base.errors import UserError
from lsai_core.config.train import TrainConfig
from lsai_core.prediction.memory import predict
from lsai_core.prediction.roofline import estimate
from lsai_core.profiling.gpus import MARGIN, enough_gib, find_gpu, spare_gib, usable_gib
from lsai_lab.peers.titan_file import read_titan
from lsai_lab.predictions import plan_predicted
from lsai_lab.predictions.asked import Source
from lsai_lab.predictions.plan import TIE, Plan, make_plan
from lsai_lab.predictions.plan_files import (
    arguments,
    arguments_file,
    flavor_of,
    titan_file,
    titan_gib,
)
from lsai_lab.predictions.plan_predicted import Room, Search
from lsai_lab.predictions.plan_space import chains, loss_chunk
from lsai_lab.predictions.plan_told import told

H100 = find_gpu("h100")
SEQUENCES, LENGTH = 8, 256
SMALL = {"n_layers": 2, "d_model": 256, "d_ff": 1024}
# What is no choice in the small space: 8-bit states or whole ones, of bf16 weights.
FIXED: dict[str, Any] = {
    "compile": False,
    "precision": "bf16",
    "optim": {"rounding": "stochastic"},
}
_KEYS = (
    "answer found gpu gpus memory_gib budget_gib margin spare_gib margin_source usable_gib seq_len "
    "tokens_per_step numerics plan reasons next nearest predictions remarks files"
)
_SETTING = (
    "words micro_batch accumulation activations states loss reserved_gib peak_gib host_gib step_s "
    "tokens_per_s rates attention settings config"
)
KEYS, SETTING = ({*names.split(" ")} for names in (_KEYS, _SETTING))


def small() -> TrainConfig:
    overrides = {"seq_len": LENGTH, "model": SMALL}
    return Source(model="lab-tiny").run(find_gpu("h100"), None, overrides).config


def planned(budget_gib: float, fixed: dict[str, Any] | None = None, **options: Any) -> Plan:
    room = Room(H100, budget_gib)
    tokens = SEQUENCES * LENGTH
    return make_plan(small(), tokens, room, fixed=fixed or FIXED, packages="none", **options)


def test_each_try_is_told_with_how_many_are_left() -> None:
    told: list[int] = []
    plan = planned(0.3, on_next=lambda words, left: told.append(left))
    assert len(told) == len(plan.search.tried) and min(told) >= 0 and told[-1] <= told[0]
    assert all(n + left <= 3 * len(told) for n, left in enumerate(told, 1)), told


def everything(room: Room) -> list[tuple[float, float]]:
    """GiB reserved and seconds of every setting of the small space."""
    search = Search(room, [1, 2, 4, 8], SEQUENCES, "none")
    chunk = loss_chunk(small(), room.usable_gib)
    tried = [
        search.look(kind, size, chain.rank)
        for chain in chains(small(), FIXED, "harmless", chunk=chunk)
        for kind in chain.kinds
        for size in search.sizes
    ]
    assert len(tried) == 2 * 2 * 5 * 4
    return [(one.reserved_gib, one.step_s) for one in tried]


@pytest.fixture(scope="module")
def plans() -> list[tuple[float, Plan]]:
    """Budgets from the smallest that is enough to one for all, each with its plan."""
    reserved = [gib for gib, _ in everything(Room(H100))]
    smallest, largest = min(reserved), max(reserved)
    shares = (0.0, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)
    budgets = [(smallest + share * (largest - smallest)) * 1.0001 for share in shares]
    return [(budget, planned(enough_gib(budget))) for budget in budgets]


def test_no_setting_that_fits_is_faster(plans: list[tuple[float, Plan]]) -> None:
    for budget, plan in plans:
        assert plan.chosen is not None and plan.chosen.reserved_gib <= budget
        assert plan.room.usable_gib == pytest.approx(budget)
        best_s = min(seconds for gib, seconds in everything(plan.room) if gib <= budget)
        assert plan.known[0].step_s <= best_s * 1.001
        assert plan.chosen.step_s <= best_s * (1 + TIE)


def test_a_larger_budget_is_never_slower(plans: list[tuple[float, Plan]]) -> None:
    fastest = [plan.known[0].step_s for _, plan in plans]
    chosen = [plan.chosen.step_s for _, plan in plans if plan.chosen]
    assert all(after <= before for before, after in pairwise(fastest))
    assert all(after <= before * (1 + TIE) for before, after in pairwise(chosen))
    assert fastest[0] > 1.5 * fastest[-1]  # the range of budgets means something


def test_few_settings_are_predicted(plans: list[tuple[float, Plan]]) -> None:
    for _, plan in plans:
        assert len(plan.search.tried) <= 44  # of 80
        assert plan.others == sorted(plan.others, key=lambda tried: tried.step_s)
        assert len(plan.others) <= 3


def test_memory_that_is_left_is_filled_with_blocks_that_compute_less_again(
    plans: list[tuple[float, Plan]],
) -> None:
    """Between two kinds of the same micro-batch a plan is faster than the smaller one."""
    in_some = [plan for _, plan in plans if plan.known[0].config.checkpoint_blocks is not None]
    assert in_some
    for plan in in_some:
        found, usable_gib = plan.known[0], plan.room.usable_gib
        best_s = min(seconds for gib, seconds in everything(plan.room) if gib <= usable_gib)
        assert found.reserved_gib <= usable_gib and found.step_s < best_s
        words = [reason["reason"] for reason in told(plan)["reasons"]]
        assert f"of {found.config.model.n_layers} blocks" in found.words and words


def test_a_plan_is_what_predict_says_of_it(plans: list[tuple[float, Plan]]) -> None:
    for _, plan in plans:
        assert plan.chosen is not None
        found, time = (
            predict(plan.chosen.config, plan.chosen.attention),
            estimate(plan.chosen.config, H100, plan.chosen.attention),
        )
        assert time is not None and plan.chosen.step_s == time.step_s
        assert plan.chosen.reserved_gib == found.reserved
        assert plan.chosen.config.tokens_per_step == SEQUENCES * LENGTH


def test_as_fast_with_states_nearer_to_fp32_is_taken(plans: list[tuple[float, Plan]]) -> None:
    last = plans[-1][1]
    assert last.chosen is not None
    assert last.chosen.config.optim.states == "full"
    assert last.chosen.config.grad_checkpoint == "none" and last.chosen.config.grad_accum == 1


def test_reasons_say_what_the_other_choice_costs(plans: list[tuple[float, Plan]]) -> None:
    for budget, plan in plans:
        found = told(plan)
        by_choice = {reason["choice"]: reason for reason in found["reasons"]}
        assert set(by_choice) == {"micro_batch", "activations", "states", "loss"}
        for reason in found["reasons"]:
            missing, slower = reason["missing_gib"], reason["slower"]
            assert missing is None or missing > 0, reason
            assert slower is None or slower > -TIE, reason
            assert (reason["instead"] is None) == (missing is None and slower is None), reason
        assert found["plan"]["reserved_gib"] <= budget


def test_numerics_go_no_further_than_allowed() -> None:
    fixed = {"compile": False}
    generous = planned(4.0, fixed, allowed="fp32")
    assert generous.chosen is not None
    assert all(tried.config.precision == "bf16_autocast" for tried in generous.known)
    assert all(tried.config.optim.states == "full" for tried in generous.known)
    assert all(tried.config.fp8.recipe == "none" for tried in planned(4.0, fixed).known)
    rounded = [t.config for t in planned(4.0, fixed).known if t.config.precision == "bf16"]
    assert rounded and all(config.optim.rounding == "stochastic" for config in rounded)
    allowed = chains(small(), fixed, "fp8")
    assert {chain.kinds[0].fp8.recipe for chain in allowed} == {"none", "fused"}
    assert len(chains(small(), fixed, "fp8", fp8=False)) == len(chains(small(), fixed, "harmless"))


def test_what_is_set_is_no_choice() -> None:
    fixed = FIXED | {"grad_checkpoint": "full", "batch_size": 2, "loss": "full"}
    plan = planned(4.0, fixed)
    assert plan.known
    for tried in plan.known:
        config = tried.config
        assert (config.grad_checkpoint, config.loss) == ("full", "full")
        assert (config.batch_size, config.grad_accum) == (2, 4)
    assert {reason["reason"] for reason in told(plan)["reasons"]} >= {"as it was set"}


def test_host_memory_is_asked_where_nothing_else_fits() -> None:
    lab_model = Source(model="lab").run(find_gpu("h100"), None, {"seq_len": 512}).config
    fixed = FIXED | {"loss": "fused"}
    plan = make_plan(lab_model, 4 * 512, Room(H100, enough_gib(0.29)), fixed=fixed, packages="none")
    assert plan.offloaded and plan.chosen is not None and plan.chosen.host_gib > 0
    offload = {reason["choice"]: reason for reason in told(plan)["reasons"]}["activations"]
    assert offload["instead"] == "without host memory" and offload["missing_gib"] > 0


def test_nothing_fits_and_what_would() -> None:
    plan = planned(0.02)
    found = told(plan)
    assert not found["found"] and found["plan"] is None and not found["next"]
    nearest = found["nearest"]
    assert found["answer"].startswith("Nothing fits: ")
    assert nearest["missing_gib"] == pytest.approx(nearest["reserved_gib"] - plan.room.usable_gib)
    enough = planned(nearest["smallest_budget_gib"] * 1.0001)
    assert enough.chosen is not None
    assert planned(nearest["smallest_budget_gib"] * 0.97).chosen is None
    gpu = find_gpu(nearest["smallest_gpu"])
    assert nearest["reserved_gib"] <= usable_gib(gpu)


def test_sharded_over_gpus() -> None:
    config = Source(model="lab-tiny").run("h100", 4, {"seq_len": LENGTH, "model": SMALL}).config
    fixed = FIXED | {"loss": "fused", "grad_checkpoint": "none"}
    plan = make_plan(config, 16 * LENGTH, Room(H100, 4.0), fixed=fixed, packages="none")
    assert plan.chosen is not None
    assert plan.chosen.config.parallel.fsdp == 4
    assert plan.chosen.config.tokens_per_step == 16 * LENGTH
    assert "FSDP over 4 GPUs" in told(plan)["answer"]


def question(*more: str) -> list[str]:
    """A question of the command that takes a few predictions."""
    fixed = ("precision=bf16", "optim.rounding=stochastic", "optim.states=full", "loss=fused")
    words = ["plan", "--study", "memory", "--variant", "baseline", "--gpu", "h100", "--seq-len"]
    words += ["64", "--tokens", "512", "--installed", "none", "--set", "compile=false"]
    return [*words, *(word for pair in fixed for word in ("--set", pair)), *more]


@pytest.fixture(scope="module")
def project(new_project: Callable[..., Project]) -> Project:
    return new_project({"baseline": {}})


@pytest.fixture(scope="module")
def written(project: Project) -> Iterator[dict[str, Any]]:
    """The plan of the command, and its study in the project."""
    path = project.root / "params" / "studies" / "mine.yaml"
    code, out, err = project.lsai(*question("--budget", "1", "--write-yaml", str(path), "--json"))
    assert code == 0, err
    yield json.loads(out)
    path.unlink()


def test_json_has_its_keys(written: dict[str, Any]) -> None:
    assert set(written) == KEYS
    assert set(written["plan"]) == SETTING
    for other in written["next"]:
        assert set(other) == SETTING | {"slower", "why"}
    assert written["found"] and written["nearest"] is None
    assert written["margin"] == MARGIN and "MARGIN" in written["margin_source"]
    assert written["files"][0]["path"].endswith("mine.yaml")


def test_the_study_that_is_written_is_predicted_as_the_plan(
    project: Project, written: dict[str, Any]
) -> None:
    asked = ("predict", "--study", "mine", "--variant", "planned", "--gpu", "h100")
    code, out, err = project.lsai(*asked, "--installed", "none", "--json")
    assert code == 0, err
    said, plan = json.loads(out), written["plan"]
    assert said["reserved_gib"] == plan["reserved_gib"] and said["peak_gib"] == plan["peak_gib"]
    assert said["gpus"][0]["step s"] == plan["step_s"] and said["gpus"][0]["verdict"] == "fits"


def test_the_study_that_is_written_trains(project: Project, written: dict[str, Any]) -> None:
    few = ("--set", "steps=3", "--set", "profile.skip_steps=1", "--set", "eval.sequences=2")
    code, out, err = project.lsai("train", "--study", "mine", "--technique", "planned", *few)
    assert code == 0, out + err
    trained = next(run for run in project.found().values() if run.summary.id.study == "mine")
    kept = json.loads((trained.folder / "config.json").read_text())
    for key in ("batch_size", "grad_accum", "grad_checkpoint", "precision", "loss"):
        assert kept[key] == written["plan"]["config"][key]


def test_the_first_line_can_be_acted_on(project: Project, written: dict[str, Any]) -> None:
    code, out, err = project.lsai(*question("--budget", "1"))
    assert code == 0, err
    first, *below = out.splitlines()
    assert re.fullmatch(r"Micro-batch \d+.*: \d\.\d\d of 1\.00 GiB, about [\d,]+ tokens/s", first)
    assert first == written["answer"]
    assert "0.30 GiB stay free" in out and "Why:" in below and "The next best:" in below
    assert max(map(len, below)) <= 100


def test_nothing_fits_ends_with_1(project: Project) -> None:
    path = project.root / "never.yaml"
    code, out, _ = project.lsai(*question("--budget", "0.001", "--write-yaml", str(path)))
    assert code == 1 and out.startswith("Nothing fits: ") and not path.exists()
    assert "It would fit a budget of" in out.splitlines()[0]


WRONG = {
    ("--model", "lab"): "how many tokens an optimizer step has",
    ("--model", "lab", "--tokens", "1000", "--seq-len", "512"): "take 512 or 1,024",
    ("--model", "nothing", "--tokens", "4096"): "unknown preset",
    ("--model", "lab", "--tokens", "4096", "--set", "grad_accum=2"): "follows from --tokens",
    ("--model", "lab", "--tokens", "8192", "--set", "batch_size=3"): "does not divide",
    ("--model", "lab", "--tokens", "4096", "--margin", "0.9"): "a share from 0 to 0.5",
    ("--model", "lab", "--tokens", "4096", "--budget", "-1"): "a budget is so many GiB",
    ("--model", "lab", "--tokens", "4096", "--numerics", "fp4"): "fp4",
    ("--model", "lab", "--tokens", "4096", "--torchtitan", "a.toml"): "one of its own shapes",
    ("--model", "lab", "--tokens", "4096", "--hf-args", "a.yaml"): "ends in .py or .json",
    ("--model", "lab", "--tokens", "4096", "--write-yaml", "no/such/a.yaml"): "no folder",
    ("--tokens", "4096"): "say what to predict",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_question_ends_with_2_before_the_work(
    words: tuple[str, ...], project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_predicted, "predict", lambda *_: pytest.fail("work began"))
    code, out, err = project.lsai("plan", "--gpu", "h100", *words)
    assert code == 2 and not out and WRONG[words] in err and err.count("\n") == 1, err


def llama(**changes: Any) -> TrainConfig:
    asked = (
        Source(model="llama3-8b").run(find_gpu("h100"), None, {"seq_len": 8192, **changes}).config
    )
    return asked.model_copy(update={"batch_size": 2, "grad_accum": 4})


def write(path: Path, option: str, config: TrainConfig) -> Path:
    """The file of `option` for a plan."""
    file = titan_file(path, config.model) if option == "titan" else arguments_file(path)
    path.write_text(file.text(config, "Micro-batch 2: the plan"))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"grad_checkpoint": "full"},
        {"grad_checkpoint": "none", "precision": "bf16_autocast"},
        {"grad_checkpoint": "selective", "fp8": {"recipe": "fused"}},
        {"grad_checkpoint": "full", "parallel": {"fsdp": 8}, "precision": "bf16_autocast"},
        {"parallel": {"fsdp": 8, "cpu_offload": True}, "compile": False},
    ],
)
def test_torchtitan_reads_what_was_meant(changes: dict[str, Any], tmp_path: Path) -> None:
    config = llama(**changes)
    path = write(tmp_path / "plan.toml", "titan", config)
    read = TrainConfig.model_validate(read_titan(path, None).config)
    same = ("seq_len", "batch_size", "grad_accum", "precision", "grad_checkpoint", "compile")
    assert {key: getattr(read, key) for key in same} == {k: getattr(config, k) for k in same}
    assert read.parallel == config.parallel and read.tokens_per_step == config.tokens_per_step
    assert flavor_of(read.model) == flavor_of(config.model) == ("llama3", "8B")
    assert (read.fp8.recipe == "none") == (config.fp8.recipe == "none")
    told_there = path.read_text()
    assert "Micro-batch 2: the plan" in told_there and "loss in chunks" in told_there


def test_what_torchtitan_has_not_is_named(tmp_path: Path) -> None:
    config = llama(grad_checkpoint="attention", optim={"states": "8bit", "rounding": "stochastic"})
    path = write(tmp_path / "plan.toml", "titan", config)
    comments = " ".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    for lost in ("8-bit states", "stochastic rounding", "grad_checkpoint attention"):
        assert lost in comments
    assert TrainConfig.model_validate(read_titan(path, None).config).grad_checkpoint == "full"
    assert titan_gib(path) > predict(config).reserved  # whole states and logits


def test_arguments_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = llama(grad_checkpoint="full", precision="bf16_autocast")
    script = write(tmp_path / "plan.py", "hf", config)
    said = arguments(config)
    known = transformers.TrainingArguments.__dataclass_fields__
    sharded = arguments(llama(parallel={"fsdp": 4}))
    assert not (set(said) | set(sharded)) - set(known)
    assert said["per_device_train_batch_size"] * said["gradient_accumulation_steps"] == 8
    assert said["gradient_checkpointing"] and said["bf16"]
    assert "loss in chunks" in script.read_text() and "dtype=torch.float32" in script.read_text()
    kept = write(tmp_path / "plan.json", "hf", config)
    assert json.loads(kept.read_text()) == said
    # as code, with what only a GPU has left out
    here = script.read_text().replace("bf16=True", "bf16=False, use_cpu=True")
    script.write_text(here.replace("use_liger_kernel=True", "use_liger_kernel=False"))
    found = runpy.run_path(str(script))["arguments"]
    assert found.per_device_train_batch_size == 2 and found.lr_scheduler_type.value


def test_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    fixed = {"precision": "bf16", "optim.rounding": "stochastic", "compile": False}
    shape = {f"model.{name}": size for name, size in SMALL.items()}
    overrides = fixed | shape | {"optim.states": "full", "loss": "fused"}
    plan = lab.plan("lab-tiny", "h100", tokens=2048, seq_len=256, budget=1.0, overrides=overrides)
    assert plan.fits and plan.config is not None and plan.config.batch_size == 8
    assert plan.answer in " ".join(repr(plan).split()) and "<table>" in plan._repr_html_()
    assert plan.settings["why"].iloc[0] == "chosen" and len(plan.settings) > 1
    with pytest.raises(UserError, match="how many tokens"):
        lab.plan("lab-tiny", "h100")


def test_the_committed_tasks_are_those_that_are_drawn() -> None:
    tasks = json.loads(plan_tasks.TASKS.read_text(encoding="utf-8"))
    assert tasks == plan_tasks.draw() and len(tasks) == 200
    for task in tasks:
        assert task["tokens"] % task["seq_len"] == 0 and 4 <= task["budget_gib"] <= 72


@pytest.mark.parametrize("memory_gib", [2.0, 9.9, 10.0, 24.0])
def test_what_stays_free_does_not_shrink_with_small_memories(memory_gib: float) -> None:
    spare = spare_gib(memory_gib)
    assert spare == pytest.approx(max(0.03 * memory_gib, 0.3))
    assert enough_gib(memory_gib - spare) == pytest.approx(memory_gib)
    assert spare_gib(memory_gib, 0.0) == 0


def test_blocks_that_were_set_are_no_choice_of_the_plan() -> None:
    fixed = FIXED | {"grad_checkpoint": "full", "checkpoint_blocks": 1, "loss": "fused"}
    plan = planned(4.0, fixed)
    assert plan.chosen is not None and plan.chosen.config.checkpoint_blocks == 1
    reasons = {reason["choice"]: reason["reason"] for reason in told(plan)["reasons"]}
    assert reasons["activations"] == "as it was set"
