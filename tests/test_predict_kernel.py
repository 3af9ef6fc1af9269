"""Which attention kernel a prediction assumes: what `auto` would choose on that GPU with what is
installed there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import Project, tiny

import lsai_lab as lab
from lsai_core.attention.measured import shipped
from lsai_core.base.errors import UserError
from lsai_core.config.train import TrainConfig
from lsai_core.prediction.fake_kernels import FUSED
from lsai_core.prediction.kernel import PACKAGES, kernel_on, packages_here, packages_named
from lsai_core.prediction.memory import predict
from lsai_core.profiling.gpus import find_gpu
from lsai_lab.predictions.will_fit import will_fit

WIDE = {
    "n_layers": 1,
    "d_model": 1024,
    "n_heads": 2,
    "n_kv_heads": 2,
    "d_ff": 64,
    "vocab_size": 320,
}


def run(**changes: Any) -> TrainConfig:
    return tiny(**{"precision": "bf16", "seq_len": 2048, **changes})


@pytest.mark.parametrize(
    ("gpu", "packages", "changes", "kernel"),
    [
        ("h100", "none", {"attention": {"window": 384}}, "sdpa_efficient"),
        ("h200", "fa2", {"attention": {"window": 384}}, "fa2"),
        # measured without it, where torch alone masks
        ("h100", "fa2", {"attention": {"window": 384}}, "fa2"),
        ("h100", "fa2", {}, "sdpa_cudnn"),
        ("h100", "fa2,fa4", {"attention": {"window": 384}}, "fa4"),
        ("h100", "fa4", {"attention": {"window": 4096}, "seq_len": 4096}, "fa4"),
        ("rtx4090", "none", {}, "sdpa_cudnn"),
        ("rtx4090", "fa3,fa4", {}, "sdpa_cudnn"),
        ("rtx4090", "fa2", {"attention": {"window": 384}}, "fa2"),
        ("rtx4090", "none", {"attention": {"window": 384}}, "flex"),
        ("t4", "fa2,fa3,fa4", {"precision": "fp32"}, "sdpa_math"),
        ("h100", "fa2,fa3,fa4", {"precision": "fp32"}, "sdpa_efficient"),
        ("h100", "fa2,fa3,fa4", {"model": WIDE}, "sdpa_efficient"),
        ("24GiB", "none", {}, "sdpa_cudnn"),
        ("h100", "none", {"attention": {"backend": "fa2"}}, "fa2"),
    ],
)
def test_auto_is_what_it_would_be_there(
    gpu: str, packages: str, changes: dict[str, Any], kernel: str
) -> None:
    assert kernel_on(find_gpu(gpu), run(**changes), packages_named(packages)) == kernel


def test_auto_is_the_fastest_that_was_measured_on_that_gpu() -> None:
    """Of every shape in the table, with all that was measured installed and with torch alone."""
    for row in shipped():
        if row.dtype != "bfloat16" or not row.causal:
            continue
        heads = {"n_heads": 4, "n_kv_heads": 2 if row.grouped else 4, "d_model": 4 * row.head_dim}
        config = run(
            model={"n_layers": 1, "d_ff": 64, "vocab_size": 320, **heads},
            attention={"window": row.window},
            seq_len=row.length,
        )
        here = set(PACKAGES) & set(row.training)
        if here != {"fa2", "fa4"}:
            continue
        assert kernel_on(find_gpu(row.gpu), config, here) == next(iter(row.training))
        others = [name for name in row.training if name not in PACKAGES]
        assert kernel_on(find_gpu(row.gpu), config, ()) == others[0]


@pytest.mark.parametrize(
    ("gpu", "changes", "said"),
    [
        ("h100", {"attention": {"backend": "fa2"}, "model": WIDE}, "head dimensions 8 to 256"),
        ("h100", {"attention": {"backend": "fa4"}, "model": WIDE}, "head dimensions 8 to 128"),
        ("h100", {"attention": {"backend": "sdpa_cudnn", "window": 100}}, "no sliding window"),
        (
            "rtx4090",
            {"attention": {"backend": "fa3"}},
            "another architecture than that of RTX 4090",
        ),
        ("t4", {"attention": {"backend": "sdpa_flash"}}, "another architecture than that of T4"),
        ("b200", {"attention": {"backend": "fa3"}}, "another architecture than that of B200"),
    ],
)
def test_what_no_kernel_can_do_is_refused(gpu: str, changes: dict[str, Any], said: str) -> None:
    for trainer in (None, "hf"):
        with pytest.raises(UserError) as error:
            will_fit(run(**changes), [find_gpu(gpu)], trainer)  # type: ignore[arg-type]
        assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fa5", "did you mean"),
        ("flash", "known: fa2"),
        ("sdpa_flash", "comes with torch"),
        ("", "expects some of fa2"),
        (" , ", "expects some of fa2"),
        ("none,fa2", "is no package"),
    ],
)
def test_packages_that_are_none_are_one_line(text: str, said: str) -> None:
    with pytest.raises(UserError, match="--installed") as error:
        packages_named(text)
    assert said in str(error.value)


def test_usual_runs_are_predicted_as_before_and_packages_of_this_environment_are_found() -> None:
    assert packages_here() <= set(PACKAGES)
    for changes in ({}, {"attention": {"window": 512}}, {"precision": "bf16_autocast"}):
        config = run(**changes)
        found = will_fit(config, [find_gpu("h200")], None, None, "fa2")
        assert found["peak_gib"] == pytest.approx(predict(config, FUSED).peak)


def test_both_answers_are_given_where_they_differ() -> None:
    window = {"attention": {"window": 384}, "seq_len": 12_288, "batch_size": 1}
    found = will_fit(run(**window), [find_gpu("h100")], None, None, "none")
    (other,) = found["otherwise"]
    assert found["attention"] == "sdpa_efficient" and other["attention"] == "fa4"
    assert other["needs GiB"] < 0.9 * found["needs_gib"]
    assert other["step s"] < found["gpus"][0]["step s"]
    swapped = will_fit(run(**window), [find_gpu("h100")], None, None, "fa4")
    (other,) = swapped["otherwise"]
    assert swapped["attention"] == "fa4" and other["attention"] == "sdpa_efficient"
    assert other["needs GiB"] == pytest.approx(found["needs_gib"])
    assert will_fit(run(seq_len=128), [find_gpu("h100")], None, None, "none")["otherwise"] == []


def test_the_command_line_says_its_assumption(shared: Project) -> None:
    words = ["predict", "--model", "lab", "--set", "model.n_layers=1", "--gpu", "h100"]
    long = ["--set", "attention.window=384", "--set", "seq_len=8192"]
    code, out, _ = shared.lsai(*words, *long, "--installed", "none")
    assert code == 0 and "Attention kernel assumed: sdpa_efficient." in out
    assert "With other packages" in out and "fa4" in out
    code, out, _ = shared.lsai(*words, *long, "--installed", "fa4", "--json")
    found = json.loads(out)
    assert code == 0 and found["attention"] == found["gpus"][0]["attention"] == "fa4"
    for wrong, said in (
        (["--installed", "fa9"], "fa9"),
        (
            [
                "--set",
                "attention.backend=fa2",
                "--set",
                "model.n_heads=1",
                "--set",
                "model.n_kv_heads=1",
            ],
            "head dimensions",
        ),
    ):
        code, out, err = shared.lsai(*words, *wrong)
        assert code == 2 and not out and said in err and len(err.splitlines()) == 1


def test_a_prediction_says_what_does_not_run_on_the_gpu() -> None:
    """AMD's GPUs take the kernels that torch brings for them; of this package's own, and of fp8, a
    line says that they do not run there, or nothing is predicted."""
    for gpu, kernel in (("MI300X", "sdpa_flash"), ("T4", "sdpa_math")):
        found = lab.predict("lab-tiny", gpu)
        assert found.gpus["attention"].tolist() == [kernel]
        (remark,) = found.remarks
        assert remark.startswith(f"{gpu}: PyTorch's own operations run there in place of")
        assert remark in " ".join(repr(found).split())
    assert lab.predict("lab-tiny", "h100").remarks == []
    assert lab.predict("lab-tiny", "24GiB").remarks == []
    fp8 = {"fp8.recipe": "fused"}
    for gpu in ("A100-80", "MI300X", "T4"):
        with pytest.raises(UserError, match=f"fp8.recipe fused does not run on {gpu}"):
            lab.predict("lab-tiny", gpu, overrides=fp8)
    (told,) = lab.predict("lab-tiny", overrides=fp8).remarks
    assert told == "fp8.recipe fused does not run on A100-40, A100-80"
    with pytest.raises(UserError, match="sdpa_cudnn is for NVIDIA's GPUs, and MI210 is AMD's"):
        lab.predict("lab-tiny", "MI210", overrides={"attention.backend": "sdpa_cudnn"})


def test_a_prediction_with_offloading_says_how_much_host_memory_it_needs() -> None:
    found = lab.predict("lab-tiny", "h100", overrides={"parallel.cpu_offload": True})
    assert found.host_gib > 0
    assert f"in host memory, a GPU: {found.host_gib:.3g}"[:27] in " ".join(repr(found).split())
    assert "in host memory" not in repr(lab.predict("lab-tiny", "h100"))


def test_a_plan_says_what_it_was_asked_and_how_much_host_memory_it_needs() -> None:
    away = {"parallel.cpu_offload": True}
    found = lab.plan("lab-tiny", "24GiB", tokens=2048, seq_len=512, overrides=away)
    host = found.settings["host_gib"][0]
    assert host > 0 and f"{host:.2f} GiB of host memory" in found.answer
    assert "2,048 tokens a step, in sequences of 512" in repr(found)
