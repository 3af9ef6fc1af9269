"""Files of other trainers: every key is translated, decides nothing, is told or is refused by
name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Project

from lsai_core.base.errors import UserError
from lsai_core.config.strict import validated
from lsai_core.config.train import TrainConfig
from lsai_core.model.transformer import count_parameters
from lsai_lab.peers.titan_file import TitanRun, read_titan
from lsai_lab.peers.titan_keys import BOOL, FLAVORS, INT, KEYS, LIST, NUMBER, READ, TEXT, TEXTS
from lsai_lab.peers.trainer_file import read_trainer_file
from lsai_lab.peers.trainer_memory import TrainerMemory, predict_as, trainer_memory_of


def read(
    tmp_path: Path, text: str | bytes, gpus: int | None = 8, name: str = "run.toml"
) -> TitanRun:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_trainer_file(path, gpus)


def config_of(run: TitanRun) -> TrainConfig:
    return validated(TrainConfig, run.config, "test")


def refused(
    tmp_path: Path, text: str | bytes, said: str, gpus: int | None = 8, name: str = "run.toml"
) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, text, gpus, name)
    told = str(error.value)
    assert said in told and "\n" not in told and told.startswith(str(tmp_path)), told


NEWEST = """
[model]
flavor = "8B"
converters = ["quantize.linear.float8"]
[training]
local_batch_size = 2
global_batch_size = 64
seq_len = 8192
enable_cpu_offload = true
[parallelism]
data_parallel_shard_degree = 4
data_parallel_replicate_degree = 2
fsdp_reshard_after_forward = "never"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
[quantize.linear.float8]
recipe_name = "rowwise"
filter_fqns = ["output"]
"""
FIRST = """
[model]
name = "llama3"
flavor = "70B"
norm_type = "rmsnorm"
[optimizer]
name = "AdamW"
[training]
batch_size = 1
seq_len = 4096
data_parallel_degree = -1
tensor_parallel_degree = 1
fp8_linear = ""
compile = true
[experimental]
pipeline_parallel_degree = 1
[activation_checkpoint]
mode = "full"
"""
OF_0_1 = """
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[optimizer]
name = "AdamW"
implementation = "for-loop"
[training]
batch_size = 2
seq_len = 8192
compile = true
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
[float8]
filter_fqns = ["output"]
[activation_checkpoint]
mode = "selective"
selective_ac_option = "3"
"""


def test_files_of_three_dates_are_read_in_our_words(tmp_path: Path) -> None:
    new = read(tmp_path, NEWEST)
    run = config_of(new)
    assert (run.model.preset, run.batch_size, run.seq_len, run.compile) == (
        "llama3-8b",
        2,
        8192,
        True,
    )
    assert (run.grad_accum, run.grad_checkpoint, run.precision) == (4, "selective", "bf16_autocast")
    assert (run.fp8.recipe, run.parallel.fsdp, run.parallel.replicate) == ("torchao_rowwise", 4, 2)
    assert run.parallel.cpu_offload and not run.parallel.reshard_after_forward
    assert not new.trainer_memory and not new.remarks
    old = read(tmp_path, FIRST)
    run = config_of(old)
    assert (run.model.n_layers, run.grad_checkpoint, run.compile, run.parallel.fsdp) == (
        80,
        "full",
        True,
        8,
    )
    # It compiled no loss then, and updated weights by foreach.
    assert old.trainer_memory == {"loss": "eager", "update": "foreach"} and not old.remarks
    between = read(tmp_path, OF_0_1)
    run = config_of(between)
    assert (run.fp8.recipe, run.grad_checkpoint, run.batch_size) == ("tensorwise", "selective", 2)
    assert between.trainer_memory == {"full_every": 3, "update": "for-loop"} and not between.remarks


def test_what_a_file_leaves_out_has_the_defaults_of_its_day(tmp_path: Path) -> None:
    nothing = read(tmp_path, "", 1)
    run = config_of(nothing)
    assert (run.batch_size, run.seq_len, run.grad_checkpoint, run.compile) == (
        8,
        2048,
        "selective",
        False,
    )
    assert (run.model.n_layers, run.model.d_ff, run.model.vocab_size) == (6, 768, 2048)
    assert nothing.trainer_memory == {"full_every": 2} and run.precision == "bf16_autocast"
    old = read(tmp_path, "[training]\nbatch_size = 8\n[model]\nflavor = '8B'", 1)
    assert config_of(old).precision == "fp32", "one GPU had no AMP"
    assert (
        config_of(read(tmp_path, "[training]\nbatch_size = 8\n[model]\nflavor = '8B'", 2)).precision
        == "bf16_autocast"
    )
    assert read(tmp_path, "[model]\nnorm_type = 'rmsnorm'").config["model"]["n_layers"] == 6
    assert read(tmp_path, "[training]\nwarmup_steps = 2").config["model"]["n_layers"] == 8


def test_keys_that_never_stood_together_are_told(tmp_path: Path) -> None:
    run = read(tmp_path, "[training]\nbatch_size = 4\ndtype = 'bfloat16'\n[model]\nflavor = '8B'")
    assert config_of(run).batch_size == 4 and config_of(run).precision == "bf16"
    assert (
        len(run.remarks) == 1
        and "training.batch_size" in run.remarks[0]
        and "training.dtype" in run.remarks[0]
    )


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    plain = read(tmp_path, NEWEST)
    assert read(tmp_path, NEWEST.encode("utf-8-sig")).config == plain.config
    assert (
        read(tmp_path, b"\xef\xbb\xbf" + NEWEST.replace("\n", "\r\n").encode()).config
        == plain.config
    )


ANOTHER = {BOOL: "true", INT: "7", NUMBER: "0.5", TEXT: "'another'", TEXTS: "['another']"}
# Keys whose other value changes the prediction, and what it says then.
TRANSLATED = {
    "training.enable_cpu_offload = true": ("parallel", "cpu_offload", True),
    "parallelism.fsdp_reshard_after_forward = 'never'": (
        "parallel",
        "reshard_after_forward",
        False,
    ),
    "training.mixed_precision_param = 'float32'": ("precision", None, "fp32"),
    "training.dtype = 'bfloat16'": ("precision", None, "bf16"),
    "training.global_batch_size = 128": ("grad_accum", None, 2),
    "activation_checkpoint.mode = 'none'": ("grad_checkpoint", None, "none"),
    "activation_checkpoint.selective_ac_option = '1'": ("grad_checkpoint", None, "full"),
    "compile.enable = true": ("compile", None, True),
    "model.flavor = '8B_flex'": ("attention", "backend", "flex"),
    "model.use_flex_attn = true": ("attention", "backend", "flex"),
    "model.converters = ['float8']": ("fp8", "recipe", "tensorwise"),
    "model.converters = 'quantize.linear.float8'": ("fp8", "recipe", "tensorwise"),
    "float8.enable_float8_linear = true": ("fp8", "recipe", "tensorwise"),
    "training.seq_len = 77": ("seq_len", None, 77),
}
TRAINER_MEMORY = {
    "optimizer.early_step_in_backward = true": {"full_every": 2, "step_in_backward": True},
    "optimizer.implementation = 'foreach'": {"full_every": 2, "update": "foreach"},
    "optimizer.fused = true": {"full_every": 2},
    "optimizer.fused = false": {"full_every": 2, "update": "foreach"},
    "activation_checkpoint.selective_ac_option = 'op'": {},
    "compile.enable = true\ncompile.components = ['loss']": {"full_every": 2, "loss": "in place"},
    "compile.enable = true\ncompile.components = ['model']": {"full_every": 2, "loss": "eager"},
}


@pytest.mark.parametrize("line", TRANSLATED)
def test_keys_that_decide_memory_are_translated(tmp_path: Path, line: str) -> None:
    name, inner, wanted = TRANSLATED[line]
    value = read(tmp_path, line).config[name]
    assert (value[inner] if inner else value) == wanted


@pytest.mark.parametrize("line", TRAINER_MEMORY)
def test_keys_that_say_what_the_trainer_keeps_are_translated(tmp_path: Path, line: str) -> None:
    assert read(tmp_path, line).trainer_memory == TRAINER_MEMORY[line]


@pytest.mark.parametrize("path", KEYS)
def test_no_key_of_torchtitan_is_dropped_without_being_known_to_decide_nothing(
    tmp_path: Path, path: str
) -> None:
    """With another value it is refused by its name, told by its name, or read; the others say
    nothing of memory."""
    key = KEYS[path]
    other = ANOTHER.get(key.kind, "[]" if key.kind == LIST else "true")
    line = f"{path} = {'false' if True in key.only else other}"
    # fp8's keys mean nothing unless something is converted.
    converts = "model.converters = ['float8']\n" if "float8" in path else ""
    try:
        run = read(tmp_path, converts + line)
    except UserError as error:
        assert path in str(error) and (key.use == READ or (key.only and not key.remark))
        return
    assert key.use == READ or not key.only or key.remark
    named = any(path in remark for remark in run.remarks)
    assert named or key.use == READ or not key.only
    with pytest.raises(UserError, match="expected"):
        read(tmp_path, f"{path} = {{a = 1}}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model = 'x'", "model: expected a table, [model], got 'x'"),
        ("training = 5", "training: expected a table"),
        ("training = [1]", "training: expected a table"),
        ("parallelism = 'x'", "parallelism: expected a table"),
        ("activation_checkpoint = false", "activation_checkpoint: expected a table"),
        ("float8 = 5", "float8: expected"),
        ("compile = true", "compile: expected a table"),
        ("[training]\ncompile = 'yes'", "training.compile: expected true or"),
        ("[[training]]\nseq_len = 1", "training: expected a table"),
        (
            "[parallelism]\ntensor_parallel_degree = 'auto'",
            "tensor_parallel_degree: expected a whole number, got 'auto'",
        ),
        (
            "[parallelism]\ndata_parallel_shard_degree = [8]",
            "data_parallel_shard_degree: expected a whole number",
        ),
        ("[parallelism]\ndata_parallel_shard_degree = 2.0", "expected a whole number, got 2.0"),
        ("[parallelism]\ndata_parallel_shard_degree = true", "expected a whole number, got true"),
        (
            "[parallelism]\ndata_parallel_shard_degree = 0",
            "data_parallel_shard_degree: expected at least 1",
        ),
        (
            "[parallelism]\ndata_parallel_shard_degree = -2",
            "data_parallel_shard_degree: expected at least 1",
        ),
        (
            "[parallelism]\ndata_parallel_replicate_degree = 0",
            "data_parallel_replicate_degree: expected at least 1",
        ),
        ("[parallelism]\ndata_parallel_replicate_degree = 3", "--gpus 8 is no multiple"),
        (
            "[parallelism]\ndata_parallel_shard_degree = 4",
            "--gpus 8, but the file shares the work among 4 x 1",
        ),
        ("[parallelism]\ndata_parallel_replicate_degree = 8", "is DDP, not predicted"),
        ("a = " + "[" * 5000, "cannot be read as TOML"),
        ("a = " + "{b=" * 5000, "cannot be read as TOML"),
        ("[training]\nseq_len = 0", "training.seq_len: expected at least 1"),
        ("[training]\nseq_len = -5", "training.seq_len: expected at least 1"),
        (
            "[training]\nseq_len = 0x" + "f" * 6000,
            "expected a whole number, got a number beyond 64 bits",
        ),
        ("[training]\nseq_len = 9223372036854775807", "tokens"),
        ("[training]\nseq_len = 1979-05-27", "expected a whole number"),
        ("[training]\nlocal_batch_size = 0", "local_batch_size: expected at least 1"),
        ("[training]\nglobal_batch_size = 7", "global_batch_size = 7 is no multiple of 64"),
        ("[training]\nlocal_batch_size = 2\nbatch_size = 4", "contradict each other"),
        ("[training]\nseq_len = 4096\nseqlen = 65536", "did you mean training.seq_len"),
        (
            "[trainning]\nseq_len = 4096",
            "'trainning' is no key of torchtitan; did you mean training",
        ),
        ("[training]\n'seq\\nlen' = 4096", "is no key of torchtitan"),
        ("[peft]\nrank = 8", "'peft' is no key of torchtitan"),
        ("[model]\nname = 'qwen3'\nflavor = '8B'", "model.name = 'qwen3' is another model"),
        ("[model]\nname = 'deepseek_v3'", "another model"),
        ("[model]\nflavor = '32B'", "model.flavor = '32B' is none of llama3"),
        ("[model]\nflavor = '8b'", "did you mean 8B?"),
        ("[model]\nname = 'llama2'\nflavor = '7B_flex'", "is none of llama2"),
        ("[model]\nconverters = ['mx']", "model.converters: 'mx' is not predicted"),
        ("[model]\nconverters = ['quantize.linear.mx']", "'quantize.linear.mx' is not predicted"),
        (
            "[model]\nconverters = ['float8']\n[float8]\nrecipe_name = 'rowwise_with_gw_hp'",
            "recipe_name: 'rowwise_with_gw_hp'",
        ),
        (
            "[optimizer]\nname = 'AdamW8bit'",
            "optimizer.name: 'AdamW8bit' is not predicted, only AdamW or Adam",
        ),
        (
            "[optimizer]\nearly_step_in_backward = true\n[training]\nglobal_batch_size = 128",
            "several micro-batches",
        ),
        (
            "[activation_checkpoint]\nmode = 'memory_budget'",
            "activation_checkpoint.mode: 'memory_budget' is not predicted",
        ),
        (
            "[activation_checkpoint]\nselective_ac_option = 'ops'",
            "selective_ac_option: expected 'op' or a number",
        ),
        (
            "[activation_checkpoint]\nselective_ac_option = '²'",
            "selective_ac_option: expected 'op' or a number",
        ),
        (
            "[activation_checkpoint]\nper_op_sac_force_recompute_mm_shapes_by_fqns = ['wo']",
            "is not predicted",
        ),
        (
            "[compile]\nenable = true\nbackend = 'eager'",
            "compile.backend = 'eager' is not predicted",
        ),
        (
            "[compile]\ncomponents = ['optimizer']",
            "compile.components: 'optimizer' is none of model, loss",
        ),
        (
            "[parallelism]\nexpert_parallel_degree = 8",
            "expert_parallel_degree = 8 is not predicted",
        ),
        (
            "[parallelism]\ncontext_parallel_degree = 2",
            "context_parallel_degree = 2 is not predicted",
        ),
        (
            "[parallelism]\nfsdp_reshard_after_forward = 'sometimes'",
            "'sometimes' is not predicted, only default or always",
        ),
        ("[training]\ndtype = 'float16'", "training.dtype: 'float16' is not predicted"),
        (
            "[training]\ndtype = 'bfloat16'\nmixed_precision_param = 'float32'",
            "mixed_precision_param",
        ),
        ("[fault_tolerance]\nenable = true", "fault_tolerance.enable = true is not predicted"),
        (
            "[experimental]\ncustom_import = 'mine'",
            "experimental.custom_import = 'mine' is not predicted",
        ),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1"), "cannot be read as TOML"),
        (b"\xff\xfe[\x00", "cannot be read"),
        (b"\x00", "cannot be read"),
        ("x" * 2**21, "larger than 1 MiB"),
    ],
)
def test_what_cannot_be_predicted_is_one_line_that_names_the_key(
    tmp_path: Path, text: str | bytes, said: str
) -> None:
    refused(tmp_path, text, said)


def test_all_gpus_are_asked_for_and_folders_are_no_files(tmp_path: Path) -> None:
    refused(tmp_path, NEWEST.replace("= 4\n", "= -1\n"), "say with --gpus how many", gpus=None)
    with pytest.raises(UserError, match="a folder"):
        read_trainer_file(tmp_path, 8)
    with pytest.raises(UserError, match="cannot be read"):
        read_titan(tmp_path / "nothing.toml", 8)


def test_what_is_told_beside_the_prediction_is_named(tmp_path: Path) -> None:
    for line, word in {
        "training.deterministic = true": "training.deterministic",
        "debug.deterministic = true": "debug.deterministic",
        "activation_checkpoint.early_stop = false": "early_stop",
        "validation.enable = true\nvalidation.local_batch_size = 64": "validation: batches of 64 x "
        "2048 tokens",
        "model.converters = ['quantize.linear.float8']": "filter_fqns",
        "model.converters = ['float8']\nfloat8.enable_fsdp_float8_all_gather = "
        "true\nfloat8.filter_fqns = ['output']": "all_gather",
    }.items():
        remarks = read(tmp_path, line).remarks
        assert len(remarks) == 1 and word in remarks[0], line
    assert not read(tmp_path, "validation.enable = true\nvalidation.local_batch_size = 4").remarks
    assert not read(tmp_path, "quantize.linear.float8.emulate = true").remarks, (
        "nothing is converted"
    )
    assert "does nothing" in read(tmp_path, "training.enable_cpu_offload = true", 1).remarks[0]


PARAMETERS = {
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("llama2", "7B"): 6_738_415_616,
    ("llama2", "13B"): 13_015_864_320,
    ("llama2", "70B"): 68_976_648_192,
}


@pytest.mark.parametrize(("name", "flavor"), PARAMETERS)
def test_its_flavors_have_the_parameters_that_are_published(
    tmp_path: Path, name: str, flavor: str
) -> None:
    assert flavor in FLAVORS[name]
    run = config_of(read(tmp_path, f"model.name = '{name}'\nmodel.flavor = '{flavor}'"))
    assert count_parameters(run.model).total == PARAMETERS[name, flavor]


SHAPE = {
    "n_layers": 4,
    "d_model": 1024,
    "n_heads": 8,
    "n_kv_heads": 8,
    "d_ff": 4096,
    "vocab_size": 32_768,
}


def test_what_a_file_says_of_the_trainers_memory_changes_the_prediction(tmp_path: Path) -> None:
    run = read(
        tmp_path,
        "compile.enable = true\nactivation_checkpoint.selective_ac_option = "
        "'2'\ntraining.local_batch_size = 2",
        1,
    )
    base = validated(TrainConfig, run.config | {"model": SHAPE}, "test")

    def peak(config: TrainConfig = base, **trainer_memory: Any) -> dict[str, float]:
        own = trainer_memory_of("torchtitan", config).model_dump() | trainer_memory
        found = predict_as(config, TrainerMemory.model_validate(own))
        return {"peak": found.peak, **found.phases}

    full, none = (
        peak(base.model_copy(update={"grad_checkpoint": mode}))["peak"] for mode in ("full", "none")
    )
    half, third = (peak(full_every=number)["peak"] for number in (2, 3))
    assert full < half < third < none
    weights = count_parameters(base.model).total * 4 / 2**30
    fused, foreach, loop = (
        peak(update=how)["optimizer"] for how in ("fused", "foreach", "for-loop")
    )
    assert foreach - fused == pytest.approx(weights, rel=0.02)
    assert fused < loop < fused + 0.6 * weights


OTHER_FILES = {
    "axolotl.yaml": (
        "base_model: NousResearch/Llama-3.2-1B\nsequence_len: 2048\nmicro_batch_size: "
        "2\ngradient_accumulation_steps: 4",
        "axolotl",
        "--set seq_len=2048 --set batch_size=2 --set grad_accum=4",
    ),
    "litgpt.yml": (
        "model_name: tiny-llama-1.1b\nprecision: bf16-mixed\ntrain:\n  micro_batch_size: 4",
        "litgpt",
        "--set batch_size=4",
    ),
    "factory.yaml": (
        "model_name_or_path: meta-llama/Llama-3-8B\nstage: sft\ncutoff_len: "
        "1024\nper_device_train_batch_size: 1",
        "LLaMA-Factory",
        "--set seq_len=1024 --set batch_size=1",
    ),
    "ds_config.json": (
        '{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 4}',
        "DeepSpeed",
        "--gpus N",
    ),
    "ds_auto.json": (
        '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}',
        "DeepSpeed",
        "--hf",
    ),
    "accelerate.yaml": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16",
        "accelerate",
        "--hf",
    ),
    "tune.yaml": (
        "model:\n  _component_: torchtune.models.llama3.llama3_8b\nbatch_size: 2",
        "torchtune",
        "--as torchtune --set batch_size=2",
    ),
    "nano.yaml": (
        "parallelism:\n  dp: 8\ntokens:\n  micro_batch_size: 2\n  sequence_length: 4096",
        "nanotron",
        "--as nanotron",
    ),
    "args.json": (
        '{"output_dir": "x", "per_device_train_batch_size": 8}',
        "the Hugging Face Trainer",
        "batch_size=8",
    ),
    "config.json": ('{"model_type": "llama"}', "a model's config.json", "--hf"),
    "other.yaml": ("a: 1", "no file of a known trainer", "--config takes torchtitan's TOML"),
    "list.json": ("[1, 2]", "no file of a known trainer", "--hf"),
    "run.py": ("import os", "torchtitan's configuration in Python", "--as torchtitan"),
    "bad.json": ("{", "cannot be read as JSON", ""),
    "bad.yaml": ("a: [", "cannot be read as YAML", ""),
    "code.yaml": (
        "base_model: !!python/object/apply:os.system [true]",
        "cannot be read as YAML",
        "",
    ),
    "deep.json": ("[" * 100_000, "cannot be read as JSON", ""),
    "bytes.json": ("\x00", "cannot be read as JSON", ""),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_files_of_other_trainers_are_recognized_and_told_how_to_ask(
    tmp_path: Path, name: str
) -> None:
    text, trainer, advice = OTHER_FILES[name]
    refused(tmp_path, text, trainer, name=name)
    refused(tmp_path, text, advice, name=name)


def test_the_command_line_tells_remarks_and_ends_in_one_line(
    shared: Project, tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    small = ["--set", "model.n_layers=2", "--set", "seq_len=128"]
    path.write_text("[model]\nflavor = 'debugmodel'\n[training]\ndeterministic = true\n")
    words = ["predict", "--config", str(path), "--gpus", "2", "--gpu", "a100-80gb", *small]
    code, out, _ = shared.lsai(*words)
    assert (
        code == 0
        and "Note: training.deterministic = true" in out
        and "Attention kernel assumed: " in out
    )
    code, out, _ = shared.lsai(*words, "--json")
    assert code == 0 and "deterministic" in json.loads(out)["remarks"][0]
    code, out, err = shared.lsai(*words, "--as", "hf")
    assert code == 2 and not out and "leave --as out" in err
    path.write_text("activation_checkpoint = false")
    code, out, err = shared.lsai(*words)
    assert code == 2 and not out and len(err.splitlines()) == 1 and "activation_checkpoint" in err
