"""The README's numbers are the committed records' numbers."""

from __future__ import annotations

import json

import lsai_lab as lab
from lsai_lab.files import repo_root
from lsai_lab.report.context.training import load_trained, loss_differences
from lsai_lab.report.fsdp import ablation, largest
from lsai_lab.report.fsdp.results import good, load_sharding, size_of
from lsai_lab.runs.records import Run, recorded_runs


def test_headline_table_is_what_the_records_say() -> None:
    runs = lab.load("memory").query("not own")
    metrics = ["tokens_per_s", "mem_peak_allocated_gib", "validation_perplexity"]
    rows = lab.summarize(runs[runs["part"] == "train"], metrics)
    speed, memory = (lab.relative(rows, metric, "baseline") for metric in metrics[:2])
    batch = runs[runs["part"] == "batch"].set_index("variant")["largest_batch"]
    readme = (repo_root() / "README.md").read_text()
    for place, row in rows.iterrows():
        assert (
            f"| {row['label']} | {row['tokens_per_s']:,.0f} | {speed[place]:.2f}x | {row['mem_peak_allocated_gib']:.2f} "
            f"({memory[place]:.0%}) | {batch[row['variant']]:,.0f} | {row['validation_perplexity']:.2f} |"
        ) in readme
    apart = ((rows["tokens_per_s_high"] - rows["tokens_per_s_low"]) / rows["tokens_per_s"]).max()
    assert f"differ by at most {apart:.1%}" in readme and f"{runs['parameters'].max() / 1e6:.1f} M" in readme


def test_the_table_of_trainers_is_what_the_records_say() -> None:
    runs = {
        run.summary.id.variant: run.summary.results for run in recorded_runs(repo_root() / "reports") if is_peer(run)
    }
    readme = (repo_root() / "README.md").read_text()
    settings = {
        "bf16, compiled": {
            "ours": "ours_bf16",
            "torchtitan": "titan_compiled",
            "HF Trainer, FlashAttention 2": "hf_flash_compiled",
        },
        "bf16, eager": {
            "ours": "ours_eager",
            "torchtitan": "titan_eager",
            "HF Trainer, Liger": "hf_liger",
            "HF Trainer, FlashAttention 2": "hf_flash",
            "HF Trainer": "hf_eager",
        },
        "fp8, compiled": {"ours": "ours_fp8", "torchtitan": "titan_fp8"},
    }
    spread = 0.0
    for setting, trainers in settings.items():
        ours = runs[trainers["ours"]]["tokens_per_s"]
        for trainer, name in trainers.items():
            results = runs[name]
            cells = [setting, trainer, f"{results['tokens_per_s']:,.0f}", f"{results['mfu']:.1%}"]
            cells.append(f"{results['mem_peak_allocated_gib']:.1f}")
            for end in ("p25", "p75"):
                spread = max(spread, abs(results[f"tokens_per_s_{end}"] / results["tokens_per_s"] - 1))
            cells.append("–" if trainer == "ours" else f"{ours / results['tokens_per_s']:.2f}x")
            assert "| " + " | ".join(cells) + " |" in readme
    assert f"quartiles of the steps lie within {spread:.1%} of the medians" in readme
    short, plain, single = (runs[name]["tokens_per_s"] for name in ("ours_2048", "plain_2048", "ours_batch1"))
    words = " ".join(readme.split())
    assert f"{short:,.0f} tokens/s ({short / plain:.2f} times" in words
    assert f"batch 1, {single:,.0f}" in words


def is_peer(run: Run) -> bool:
    return run.machine == "h200" and run.summary.id.study == "peers"


def test_the_speeds_of_transformer_engine_are_what_the_records_say() -> None:
    found = {
        run.summary.id.variant: run.summary.results
        for run in recorded_runs(repo_root() / "reports")
        if run.machine == "h200" and run.summary.id.study == "fp8" and run.summary.id.part == "speed"
    }
    delayed, current, block = (found[f"te_{name}"]["tokens_per_s"] for name in ("delayed", "current", "block"))
    text = " ".join((repo_root() / "README.md").read_text().split())
    assert f"{delayed:,.0f} tokens/s with delayed scaling ({current:,.0f} current, {block:,.0f} blocks)" in text
    assert f"in {found['te_delayed']['mem_peak_allocated_gib']:.1f} GiB" in text


def test_the_difference_of_fp8_is_what_the_records_say() -> None:
    losses: dict[str, list[float]] = {"bf16": [], "fused": []}
    for run in recorded_runs(repo_root() / "reports"):
        if run.machine == "h200" and run.summary.id.study == "fp8" and run.summary.id.part == "loss":
            losses[run.summary.id.variant].append(run.summary.results["validation_loss"])
    assert [len(values) for values in losses.values()] == [3, 3]
    difference = abs(sum(losses["fused"]) / sum(losses["bf16"]) - 1)
    text = " ".join((repo_root() / "README.md").read_text().split())
    assert f"differ by {difference:.1%}" in text
    claims = json.loads((repo_root() / "reports" / "recorded" / "claims.json").read_text())["claims"]
    spread = next(claim["value"] for claim in claims if claim["name"] == "bf16_quality")
    assert f"those of eight ways to train in bf16 (0.7 B) by {spread:.2%}" in text


def test_four_gpus_are_what_the_records_say() -> None:
    found = {
        run.summary.id.variant: run.summary.results
        for run in recorded_runs(repo_root() / "reports")
        if run.machine == "h200" and run.summary.id.study in ("fsdp", "longcontext")
    }
    text = " ".join((repo_root() / "README.md").read_text().split())
    spread = 0.0
    rows = {
        "bf16": ("llama_4", "titan_4"),
        "bf16, {} checkpointing": ("llama_4_alternating", "titan_4_selective"),
        "fp8": ("llama_4_fp8", "titan_4_fp8"),
    }
    for row, names in rows.items():
        ours = found[names[0]]["tokens_per_s"]
        for trainer, name in zip(("ours", "torchtitan"), names, strict=True):
            results, products = found[name], row.format("alternating" if trainer == "ours" else "operator-selective")
            faster = "–" if trainer == "ours" else f"{ours / results['tokens_per_s']:.2f}x"
            cells = [products, trainer, f"{results['tokens_per_s_per_gpu']:,.0f}", f"{results['mfu']:.1%}"]
            assert "| " + " | ".join([*cells, f"{results['mem_peak_allocated_gib']:.1f}", faster]) + " |" in text
            ends = (results[f"tokens_per_s_{end}"] / results["tokens_per_s"] for end in ("p25", "p75"))
            spread = max(spread, *(abs(end - 1) for end in ends))
    assert f"their quartiles within {spread:.1%}" in text
    alone, shared = (found[f"llama2_7b_128k_{n}"]["step_ms"] / 1e3 for n in (1, 4))
    assert f"takes {shared:.1f} s on them and {alone:.1f} s on one" in text
    alone, shared = (found[f"llama1b_128k_{n}"]["step_ms"] / 1e3 for n in (1, 4))
    assert f"one of Llama-3.2-1B takes {shared:.1f} s and {alone:.1f} s (" in text
    small, large = found["longest_1b_1"], found["longest_8b_1"]
    assert "over 1,003,520 tokens" in text and "over 450,560 tokens" in text
    assert f"in {small['step_s']:.0f} s, with {small['host_gib']:.0f} GiB of host memory, and one of Llama-3-8B" in text
    assert f"in {large['step_s']:.0f} s, with {large['host_gib']:.0f} GiB (" in text
    kept, freed, two = (
        found[name]["tokens_per_s_per_gpu"] / found["weak_1"]["tokens_per_s"]
        for name in ("weak_4_kept", "weak_4", "weak_2")
    )
    assert f"at {kept:.1%} of the speed of one alone ({freed:.1%} if" in text
    assert f"each of two, on another day and host, at {two:.1%};" in text
    weak = [found[name] for name in ("weak_1", "weak_2", "weak_4", "weak_4_kept")]
    off = max(abs(r[f"tokens_per_s_{end}"] / r["tokens_per_s"] - 1) for r in weak for end in ("p25", "p75"))
    assert f"quartiles of the steps within {off:.1%}" in text
    claims = json.loads((repo_root() / "reports" / "recorded" / "claims.json").read_text())["claims"]
    value = {claim["name"]: claim["value"] for claim in claims}
    assert f"reaches {value['shared_sequence_128k']:.1%} of what one alone" in text
    assert (
        f"tokens {value['shared_sequence_32k']:.1%}, {value['shared_sequence_torch']:.2f} times PyTorch's own" in text
    )


def test_sharded_losses_and_largest_models_are_what_the_records_say() -> None:
    text = " ".join((repo_root() / "README.md").read_text().split())
    sharding = next(found for found in load_sharding([], "h200") if found.machine == "h200")
    found = ablation.compared(sharding).set_index("variant")
    assert f"differs from one GPU's by at most {found['largest']['fsdp4']:.1e} nats per token (one seed)" in text
    assert [len(seeds) for seeds in found["seeds"]] == [1, 3, 3, 3]
    losses = good(sharding.rows("ablation", "train")).set_index("variant")["validation_loss"]  # means over the seeds
    in_bf16 = abs(losses["bf16_fsdp4"] / losses["bf16_fsdp1"] - 1)
    assert f"at most {found['early']['bf16_fsdp4']:.1e} in the first ten steps" in text
    assert f"later steps lie up to {found['largest']['bf16_fsdp4']:.1e} apart" in text
    assert f"the means over three seeds, {in_bf16:.2%}; those of fp8 and bf16 on four" in text
    assert f"GPUs {abs(losses['fp8_fsdp4'] / losses['bf16_fsdp4'] - 1):.2%} (" in text
    rows = largest.searched(sharding)
    rows = rows[rows["by"] == "layers"].set_index("variant")
    plain, both, eight, loaded = (
        size_of(rows["parameters"][name]) for name in ("plain_1", "bf16cp_1", "adam8bitcp_1", "weights_1")
    )
    assert f"{plain} parameters with fp32 states, {both} in bf16 with checkpointing, {eight} with 8-bit AdamW" in text
    assert f"{loaded} load, which fills {rows['weights_share']['weights_1']:.1%} of the memory" in text
    growth = rows["parameters"]["bf16cp_4"] / rows["parameters"]["bf16cp_1"]
    assert (
        f"On four GPUs {size_of(rows['parameters']['bf16cp_4'])} in bf16 with checkpointing, {growth:.2f} times as"
        in text
    )
    trained = next(found for found in load_trained([], "h200") if found.machine == "h200")
    gap = loss_differences(trained).set_index("model")["largest"]
    assert f"({gap['llama2-7b']:.1e} nats apart at most in ten steps)" in text
    assert f"({gap['llama3.2-1b']:.1e} nats apart)" in text


def test_records_name_no_folder_of_the_machine_they_ran_on() -> None:
    for path in (repo_root() / "reports" / "recorded").glob("*/*/*/notebook.ipynb"):
        parameters = json.loads(path.read_text())["metadata"]["papermill"]["parameters"]
        assert parameters["folder"].startswith("runs/") and parameters["data_root"] == "data", path
