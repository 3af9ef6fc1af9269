"""Other trainers: what they are given, how they end, and that they do the same work; the chapter's
sentences."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHECKOUT, TINY_MODEL, write_run
from packaging.version import Version

from lsai_core.base.errors import Unavailable, UserError
from lsai_core.base.files import read_jsonl, write_json
from lsai_core.config.strict import validated
from lsai_core.config.train import TrainConfig
from lsai_core.model.transformer import Transformer, count_parameters
from lsai_lab.data import BatchStream, Dataset
from lsai_lab.launch.launch import watched
from lsai_lab.machine.environment import package_version
from lsai_lab.peers import hf, titan, titan3
from lsai_lab.peers import run as run_module
from lsai_lab.peers.config import PeerConfig
from lsai_lab.peers.run import SERIES, adapter, run, shown_command
from lsai_lab.peers.watch import FOLDER, Job, Watch
from lsai_lab.project.files import load_yaml
from lsai_lab.runs.kinds import Context
from lsai_lab.runs.records import outcome_of
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import resolve

SMALL = {
    "model": TINY_MODEL,
    "seq_len": 32,
    "batch_size": 2,
    "steps": 8,
    "profile": {"skip_steps": 2},
    "precision": "bf16",
}


INSTALLED = package_version("torchtitan") or "none"


def needs_titan(series: str) -> pytest.MarkDecorator:
    """The test reads torchtitan's own code: of that series."""
    return pytest.mark.skipif(
        not INSTALLED.startswith(f"{series}."), reason=f"needs torchtitan {series}, not {INSTALLED}"
    )


def peer(**changes: Any) -> PeerConfig:
    study = {**SMALL, "data": {"vocab_size": 320}, **changes}
    return validated(PeerConfig, PeerConfig.from_study(study, {}), "test")


def test_a_peer_gets_the_work_from_the_study_and_nothing_of_our_kernels():
    study = {
        **SMALL,
        "attention": {"backend": "sdpa_cudnn"},
        "loss": "full",
        "log_every": 5,
        "fp8": {"recipe": "tensorwise"},
        "data": {"vocab_size": 320},
        "optim": {"lr": 1e-3, "kernel": "triton"},
        "peer": {"framework": "torchtitan"},
    }
    config = validated(PeerConfig, PeerConfig.from_study(study, {"steps": 9}), "test")
    assert (config.steps, config.skip_steps, config.fp8, config.optim.lr) == (
        9,
        2,
        "tensorwise",
        1e-3,
    )
    assert config.attention == "sdpa" and config.tokens_per_step == 64
    assert set(config.packages) == {"torchtitan", "torchao"}, "another version is another run"
    kernels = {**study, "optim": {"lr": 1e-3, "kernel": "torch"}}
    assert PeerConfig.from_study(kernels, {"steps": 9}) == PeerConfig.from_study(
        study, {"steps": 9}
    )


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"peer": {"framework": "jax"}}, "framework"),
        ({"peer": {"framework": "torchtitan", "liger": True}}, "liger"),
        (
            {"peer": {"framework": "torchtitan"}, "model": {**TINY_MODEL, "tie_embeddings": True}},
            "tie",
        ),
        ({"peer": {"framework": "hf"}, "grad_checkpoint": "selective"}, "selective"),
        ({"peer": {"framework": "hf"}, "parallel": {"fsdp": 2}}, "bf16_autocast"),
        ({"peer": {"framework": "hf"}, "steps": 2}, "skip_steps"),
        ({"peer": {"framework": "hf"}, "precision": "tf32"}, "precision"),
        ({"peer": {"framework": "hf"}, "parallel": {"tp": 2}}, "replicate or tp"),
        ({"peer": {"framework": "torchtitan"}, "parallel": {"pp": 2}}, "no pp"),
        ({"peer": {"framework": "torchtitan"}, "parallel": {"cp": 2}}, "no cp"),
        ({"peer": {"framework": "torchtitan"}, "parallel": {"kind": "zero2", "fsdp": 2}}, "kind"),
        (
            {
                "peer": {"framework": "torchtitan"},
                "parallel": {"tp": 2},
                "precision": "bf16_autocast",
            },
            "would compute in fp32",
        ),
        ({"peer": {"framework": "hf"}, "optim": {"rounding": "stochastic"}}, "rounding"),
        ({"peer": {"framework": "hf"}, "optim": {"rounded": ["norms"]}}, "all weights rounded"),
    ],
)
def test_bad_combinations_are_one_line(changes, word):
    with pytest.raises(UserError, match=word) as error:
        peer(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "profile", ["h200", "gpu", "gh200", "rtx5090", "cpu", "quick"], ids="profile-{}".format
)
def test_every_variant_is_a_whole_config_and_pairs_do_equal_work(profile):
    study = Session(profile, root=CHECKOUT).study("peers")
    shapes: dict[bool, set[Any]] = {True: set(), False: set()}  # of curves and of speeds
    for part in study.parts:
        for variant in study.measured(part):
            config = resolve(study, variant, part, 0, {})
            assert isinstance(config, TrainConfig | PeerConfig)
            if variant.endswith(("_2048", "_batch1")):
                continue
            shapes[part.startswith("curves")].add(
                (
                    config.model.model_dump_json(),
                    config.seq_len,
                    config.batch_size,
                    config.precision,
                    config.steps,
                    config.optim.lr,
                )
            )
    assert [len(found) for found in shapes.values()] == [1, 1]


def context(tmp_path: Path, ceilings: dict[str, Any]) -> Context:
    write_run(tmp_path, "machine", "machine", "ceilings", kind="ceilings", results=ceilings)
    folder = tmp_path / "peers" / "run"
    folder.mkdir(parents=True)
    return Context(folder, tmp_path / "data", tmp_path)


@pytest.mark.skipif(
    package_version("accelerate") is None, reason="the Hugging Face Trainer needs accelerate"
)
def test_the_hugging_face_trainer_does_our_work_on_a_cpu(tmp_path, corpus, ceilings):
    where = context(tmp_path, ceilings)
    data = {"source": f"file:{corpus}", "vocab_size": 320}
    config = peer(
        peer={"framework": "hf"},
        device="cpu",
        data=data,
        optim={"lr": 1e-2, "warmup_steps": 2},
        steps=40,
    )
    results = run(config, where)
    assert results["parameters"] == count_parameters(config.model).total
    assert (
        0 < results["mfu_causal"] < results["mfu"]
        and 0 < results["tflops_causal"] < results["tflops"]
    )
    assert results["tokens_per_s"] > 0 and results["first_step_s"] > 0
    assert (results["steps"], results["steps_timed"], results["tokens"]) == (40, 38, 40 * 64)
    rows = [json.loads(line) for line in (where.folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 40 and rows[0]["loss"] > 5.5 > results["train_loss"], "it learns"
    assert (where.folder / "logs" / "rank-0.log").exists() and not (
        where.folder / "results.json"
    ).exists()
    assert results["command"] == "LSAI_PEER=$RUN/peer python -m lsai_lab.peers.worker"
    assert "adamw_torch_fused" in results["arguments"] and "accelerate" in results["versions"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    "changes",
    [
        {"peer": {"framework": "torchtitan"}},
        {"peer": {"framework": "hf", "liger": True}},
        {"peer": {"framework": "hf"}, "device": "cuda"},
    ],
)
def test_what_needs_a_gpu_is_unavailable_without_one(tmp_path, ceilings, changes):
    with pytest.raises(Unavailable, match="GPU"):
        run(peer(**changes), context(tmp_path, ceilings))


def test_a_missing_package_is_unavailable_and_named(tmp_path, ceilings, monkeypatch):
    monkeypatch.setattr(
        run_module, "package_version", lambda name: None if name == "accelerate" else "1"
    )
    with pytest.raises(Unavailable, match="accelerate is not installed; pip install accelerate"):
        run(peer(peer={"framework": "hf"}, device="cpu"), context(tmp_path, ceilings))


FOUND = {
    "0.2.2": ({}, "lsai_lab.peers.titan"),
    "0.3.0": ({}, "lsai_lab.peers.titan3"),
    "0.3.1": ({"fp8": {"recipe": "rowwise"}}, "lsai_lab.peers.titan3"),
    "0.4.0": (
        {},
        r"torchtitan 0\.4\.0 has other options than 0\.2, 0\.3, .*; pip install "
        r"torchtitan==0\.2\.2",
    ),
    "0.30.0": ({}, "torchtitan 0.30.0 has other options"),
    "0.3.2": (
        {"fp8": {"recipe": "tensorwise"}},
        r"torchtitan 0\.3\.2 fp8 is rowwise, not tensorwise",
    ),
    "0.2.1": ({"fp8": {"recipe": "rowwise"}}, r"torchtitan 0\.2\.1 fp8 is tensorwise, not rowwise"),
}


@pytest.mark.parametrize("version", FOUND)
def test_the_installed_series_of_torchtitan_picks_the_adapter(version, monkeypatch):
    changes, wanted = FOUND[version]
    config = peer(peer={"framework": "torchtitan"}, **changes)
    monkeypatch.setattr("torch.__version__", "2.14.1")
    if wanted in SERIES.values():
        assert adapter(config, version) == wanted
        return
    with pytest.raises(Unavailable, match=wanted) as error:
        adapter(config, version)
    assert "\n" not in str(error.value)


def test_torchtitan_0_3_with_an_older_torch_is_one_line(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.13.0+cu130")
    with pytest.raises(
        Unavailable,
        match=r"^torchtitan 0\.3\.0 needs torch 2\.14, this is 2\.13\.0\+cu130; pip install .*2$",
    ):
        adapter(peer(peer={"framework": "torchtitan"}), "0.3.0")


@pytest.mark.slow
def test_a_torchtitan_that_cannot_be_used_is_one_line_and_exit_code_2(tmp_path):
    old = Version(torch.__version__) < Version("2.14")
    version, reason = (
        ("0.3.0", "needs torch 2.14") if old else ("0.9.0", "has other options than 0.2, 0.3")
    )
    metadata = tmp_path / f"torchtitan-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torchtitan\nVersion: {version}\n")
    own = {
        "LSAI_ROOT": str(CHECKOUT),
        "LSAI_RUNS": str(tmp_path / "runs"),
        "PYTHONPATH": f"{tmp_path}:{CHECKOUT}",
    }
    words = ["-m", "lsai_lab.cli", "study", "peers", "--only", "titan_eager", "--profile", "quick"]
    done = subprocess.run(
        [sys.executable, *words], env=os.environ | own, capture_output=True, text=True, check=False
    )
    told = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if f"(torchtitan {version} {reason}" in line
    ]
    assert done.returncode == 2 and len(told) == 1 and "; pip install torchtitan==0.2.2)" in told[0]


ENDS = {
    "out of memory": ("as_worker(folder, lambda: [0] * 10**17)", "oom", "rank 0: "),
    "raised": (
        "as_worker(folder, lambda: int('no'))",
        "failed",
        "rank 0: ValueError: invalid literal",
    ),
    "stopped": ("as_worker(folder, lambda: stop(0, None))", "preempted", "stopped"),
    "crashed": ("raise ValueError('two\\nlines')", "failed", "exit code 1: lines"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "failed", "SIGKILL (by hand"),
    "silent": ("pass", "failed", "exit code 0: no output"),
}
WORKER = """import os, pathlib, signal, sys
from lsai_lab.runs.worker import as_worker
from lsai_lab.peers.worker import stop
folder = pathlib.Path(sys.argv[1])
"""


@pytest.mark.parametrize("end", ENDS)
def test_a_peer_that_dies_is_told_in_one_line(tmp_path, end):
    program, wanted, text = ENDS[end]
    words = [sys.executable, "-c", WORKER + program, str(tmp_path)]
    with pytest.raises(Exception) as raised:
        watched(words, tmp_path, nproc=1, on_rows=lambda rows: None)
    outcome, reason = outcome_of(raised.value)
    assert outcome == wanted and text in reason and "\n" not in reason


def test_commands_show_no_path_of_this_machine(tmp_path, dataset):
    config, folder = peer(peer={"framework": "torchtitan"}), tmp_path / "run" / "peer"
    shown = shown_command(*titan.start(config, dataset, folder), folder)
    assert str(tmp_path) not in shown and sys.executable not in shown
    assert (
        "LSAI_PEER=$RUN/peer python -m torch.distributed.run" in shown
        and "$RUN/peer/tokenizer" in shown
    )


def job(
    tmp_path: Path,
    config: PeerConfig,
    monkeypatch: pytest.MonkeyPatch,
    dataset: Path = Path("nowhere"),
) -> Job:
    told = {"config": config.model_dump(mode="json"), "dataset": str(dataset), "adapter": "nothing"}
    write_json(tmp_path / "peer" / "job.json", told)
    monkeypatch.setenv(FOLDER, str(tmp_path / "peer"))
    return Job()


def test_another_model_or_missing_fp8_is_refused(tmp_path, monkeypatch):
    config = peer(peer={"framework": "hf"}, fp8={"recipe": "tensorwise"})
    watch = Watch(job(tmp_path, config, monkeypatch), torch.device("cpu"))
    with pytest.raises(RuntimeError, match="parameters"):
        watch.check(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="fp8"):
        watch.check(Transformer(config.model))


def test_a_watch_counts_steps_and_writes_finite_results(tmp_path, monkeypatch):
    watch = Watch(job(tmp_path, peer(peer={"framework": "hf"}), monkeypatch), torch.device("cpu"))
    watch.begin()
    for step in range(8):
        watch.loss(torch.tensor(float("nan") if step == 0 else 8.0 - step))
        watch.step()
        assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1, (
            "progress: the first step, then every tenth"
        )
    watch.finish(attention_kernel="sdpa")
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["steps"], results["steps_timed"], results["mem_peak_allocated_gib"]) == (
        8,
        6,
        None,
    )
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (
        rows[0]["loss"] is None
        and rows[7]["loss"] == 1.0
        and [row["steady"] for row in rows].count(True) == 6
    )


def option(words: list[str], name: str) -> str:
    return words[words.index(f"--{name}") + 1]


def test_torchtitan_options(tmp_path, dataset):
    words = titan.options(
        peer(peer={"framework": "torchtitan"}, optim={"lr": 1e-3, "kernel": "torch"}), tmp_path
    )
    assert (
        option(words, "training.dtype") == "bfloat16" and option(words, "optimizer.lr") == "0.001"
    )
    assert option(words, "activation_checkpoint.mode") == "none", (
        "torchtitan's own default is selective"
    )
    assert option(words, "training.local_batch_size") == "2" and "--compile.enable" not in words
    assert not any("float8" in word for word in words)
    assert option(words, "lr_scheduler.total_steps") == "20"  # as of the warm-up, of 8 steps
    shared = peer(peer={"framework": "torchtitan"}, parallel={"tp": 4}, batch_size=4, steps=40)
    words = titan.options(shared, tmp_path)
    assert option(words, "parallelism.tensor_parallel_degree") == "4"
    assert option(words, "training.dtype") == "bfloat16"
    assert option(words, "lr_scheduler.total_steps") == "39"
    assert shared.tokens_per_step == 4 * 32, "all processes read the same sequences"
    many = peer(
        peer={"framework": "torchtitan"},
        compile=True,
        precision="bf16_autocast",
        fp8={"recipe": "tensorwise"},
        parallel={"fsdp": 2, "replicate": 2, "reshard_after_forward": False},
        grad_checkpoint="selective",
    )
    words = titan.options(many, tmp_path)
    assert (
        option(words, "training.dtype") == "float32"
        and option(words, "compile.components") == "model,loss"
    )
    assert option(words, "model.converters") == "quantize.linear.float8"
    assert option(words, "quantize.linear.float8.filter_fqns") == "output"
    assert "--quantize.linear.float8.enable_fsdp_float8_all_gather" in words
    assert option(words, "parallelism.data_parallel_shard_degree") == "2"
    assert option(words, "parallelism.fsdp_reshard_after_forward") == "never"
    assert "--nproc-per-node=4" in titan.start(many, dataset, tmp_path)[0]


def test_peers_get_the_windows_of_our_training(tmp_path, dataset: Dataset, monkeypatch):
    config = peer(peer={"framework": "torchtitan"}, seq_len=16)
    own = BatchStream(dataset.tokens("train"), config.batch_size, config.seq_len, config.seed)
    windows = job(tmp_path, config, monkeypatch, dataset.folder).windows()
    assert len(windows) == config.steps * config.batch_size
    for step in range(config.steps):
        x_BS, y_BS = own.batch(step)
        mine = windows[step * config.batch_size :][: config.batch_size]
        assert torch.equal(torch.stack([x for x, _ in mine]), x_BS)
        assert torch.equal(torch.stack([y for _, y in mine]), y_BS)


@needs_titan("0.2")
def test_torchtitan_0_2_understands_its_options_and_builds_our_model(tmp_path):
    from torchtitan.config import ConfigManager
    from torchtitan.models.llama3 import Transformer

    from lsai_lab.peers.titan import flavor

    for model in (TINY_MODEL, {"preset": "course"}, {"preset": "lab"}):
        config = peer(
            peer={"framework": "torchtitan"},
            model=model,
            compile=True,
            fp8={"recipe": "tensorwise"},
        )
        parsed = ConfigManager().parse_args(titan.options(config, tmp_path))
        assert parsed.model.converters == [
            "quantize.linear.float8"
        ] and parsed.compile.components == ["model", "loss"]
        with torch.device("meta"):
            built = Transformer(flavor(config.model))
        assert sum(p.numel() for p in built.parameters()) == count_parameters(config.model).total


@pytest.mark.slow
@pytest.mark.skipif(INSTALLED == "none", reason="torchtitan is not installed")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"grad_checkpoint": "selective", "precision": "bf16_autocast", "parallel": {"fsdp": 2}},
        {"grad_checkpoint": "full", "compile": True},
    ],
    ids=["plain", "sharded", "compiled"],
)
def test_torchtitan_does_our_work_on_a_cpu(tmp_path, corpus, ceilings, changes, titan_on_cpu):
    where, data = context(tmp_path, ceilings), {"source": f"file:{corpus}", "vocab_size": 320}
    study = {
        "peer": {"framework": "torchtitan"},
        "device": "cpu",
        "data": data,
        "steps": 12,
        **changes,
    }
    config = peer(**study, optim={"lr": 1e-2, "warmup_steps": 2})
    results = run(config, where)
    assert results["parameters"] == count_parameters(config.model).total
    assert results["tokens"] == 12 * config.tokens_per_step == 12 * 64 * config.parallel.world_size
    losses = [row["loss"] for row in read_jsonl(where.folder / "metrics.jsonl")]
    assert len(losses) == 12 and losses[0] > 5.5 and losses[-1] < 4.5, "it learns"
    assert f"torchtitan {INSTALLED}" in results["versions"]
    assert ("--module lsai_lab.peers.titan3 --config llama" in results["command"]) == (
        "titan 0.3" in results["versions"]
    )
    logged = re.findall(
        r"step: +(\d+) .*loss: +([\d.]+)", (where.folder / "logs" / "rank-0.log").read_text()
    )
    assert [(int(step), pytest.approx(float(loss), abs=1e-4)) for step, loss in logged] == [
        (1, losses[0]),
        (12, losses[-1]),
    ]


@needs_titan("0.3")
def test_torchtitan_0_3_builds_our_model_and_is_set_as_the_study_says(tmp_path, monkeypatch):
    from torchtitan.components.quantization import float8
    from torchtitan.config import ConfigManager

    monkeypatch.setattr(float8, "has_cuda_capability", lambda *_: True)
    for model in (TINY_MODEL, {"preset": "course"}, {"preset": "llama3-8b"}):
        config = peer(
            peer={"framework": "torchtitan"},
            model=model,
            compile=True,
            fp8={"recipe": "rowwise"},
            precision="bf16_autocast",
            grad_checkpoint="selective",
            parallel={"fsdp": 2},
            optim={"lr": 3e-3, "betas": [0.8, 0.9], "weight_decay": 0.2},
        )
        watch = Watch(job(tmp_path, config, monkeypatch), torch.device("cpu"))
        parsed = ConfigManager().parse_args(titan3.options(config, tmp_path))
        with torch.device("meta"):
            built = parsed.model_spec.model.build()
        watch.check(built)
        assert (
            type(built.lm_head).__name__ == "Linear"
            and type(parsed.activation_checkpoint).__qualname__ == "SelectiveAC.Config"
        )
        assert (
            parsed.compile.enable
            and parsed.training.dtype == "float32"
            and parsed.lr_scheduler.decay_type == "cosine"
        )
        vectors, matrices = parsed.optimizer.param_groups
        given = {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.2}
        assert matrices.optimizer_kwargs == given
        assert vectors.optimizer_kwargs == {**given, "weight_decay": 0.0}
        named = [name for name, p in built.named_parameters() if re.search(vectors.pattern, name)]
        assert len(named) == sum(p.ndim == 1 for p in built.parameters())


def test_hugging_face_arguments(tmp_path, dataset):
    config = peer(peer={"framework": "hf", "liger": True}, compile=True, optim={"lr": 1e-3})
    given = hf.training_arguments(config, tmp_path, on_gpu=True)
    assert (
        given["torch_compile"]
        and given["use_liger_kernel"]
        and not given["bf16"]
        and not given["use_cpu"]
    )
    fp8 = peer(peer={"framework": "hf"}, precision="bf16_autocast", fp8={"recipe": "tensorwise"})
    assert not hf.training_arguments(fp8, tmp_path, on_gpu=True)["bf16"], "it would win over fp8"
    words, variables = hf.start(fp8, dataset, tmp_path)
    assert variables["ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"] == "false"
    assert words[1:] == ["-m", "lsai_lab.peers.worker"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    "changes",
    [
        {"peer": {"framework": "hf"}},
        {"peer": {"framework": "hf", "liger": True}},
        {"peer": {"framework": "hf"}, "fp8": {"recipe": "tensorwise"}, "compile": True},
        {"peer": {"framework": "torchtitan"}},
        {"peer": {"framework": "torchtitan"}, "fp8": {"recipe": "tensorwise"}, "compile": True},
    ],
)
def test_peers_train_on_a_gpu(tmp_path, corpus, ceilings, changes):
    model = {**TINY_MODEL, "d_model": 128, "d_ff": 256}
    config = peer(
        model=model, data={"source": f"file:{corpus}", "vocab_size": 320}, seq_len=64, **changes
    )
    try:
        results = run(config, context(tmp_path, ceilings))
    except Unavailable as error:
        pytest.skip(str(error))
    assert results["parameters"] == count_parameters(config.model).total
    assert results["tokens_per_s"] > 0 and results["mem_peak_allocated_gib"] > 0
    assert 2 < results["train_loss"] < 7


def test_the_study_s_peers_are_known_frameworks():
    study = load_yaml(CHECKOUT / "params" / "studies" / "peers.yaml")
    for name in study["parts"]["peer"]["variants"]:
        assert study["variants"][name]["config"]["peer"]["framework"] in ("hf", "torchtitan")
