"""The claim on other memory estimators a second time: their formulas written out again, from
configs, the committed predictions and published figures (see `recompute.py`)."""

import csv
import json

import numpy as np


def estimators(runs, recorded):
    """Our median error over that of the best other formula: of published figures, and that of both
    samples, published ones first."""
    samples = [_published(recorded), _recorded(runs, recorded)]
    ratios = []
    for ours, theirs in samples:
        best = min(np.median(np.abs(errors)) for errors in theirs.values())
        ratios.append(float(np.median(np.abs(ours)) / best))
    return ratios[0], ratios


def _published(recorded):
    with (recorded / "predictions" / "published.csv").open(newline="") as file:
        rows = [row | {"config": json.loads(row["config"])} for row in csv.DictReader(file)]
    rows = [row for row in rows if _is_known(row["config"])]
    said = [_formulas(row["config"], int(row["masters"]), float(row["published"])) for row in rows]
    return np.array([float(row["error"]) for row in rows]), _by_name(said)


def _recorded(runs, recorded):
    with (recorded / "predictions" / "recorded.csv").open(newline="") as file:
        kept = {row["run"]: row for row in csv.DictReader(file)}
    ours, said = [], []
    for run in runs:
        measured, config = measured_gib(run), _trained(run)
        if not measured or not _is_known(config):
            continue
        if (row := kept[run.name])["predicted_reserved"]:
            ours.append(float(row["predicted"]) / measured - 1)
            said.append(_formulas(config, 1, measured))
    return np.array(ours), _by_name(said)


def _is_known(config):
    """Whether the formulas know its way: neither shared matrices, nor stages, nor whole copies."""
    parallel = config.get("parallel", {})
    one = parallel.get("tp", 1) * parallel.get("pp", 1) == 1
    return one and parallel.get("kind", "fsdp") == "fsdp"


def measured_gib(run):
    """The peak of a training step; of a search's largest model, if it had taken a step before."""
    kind, results = run.summary["kind"], run.results
    if not run.ok:
        return None
    if kind == "model_search" and "states_gib" in results:
        return results.get("allocated_gib")
    peaks = [results.get(f"mem_peak_{name}_gib") for name in ("active", "allocated")]
    return next(filter(None, peaks), None) if kind == "train" else None


def _trained(run):
    config = run.config()
    if run.summary["kind"] != "model_search":
        return config
    size, train = run.results.get("largest_size"), dict(config["train"])
    if config["grow"] == "n_layers":
        train["model"] = train["model"] | {"n_layers": size}
    elif size:
        shape = {"n_layers": 8 * size, "d_model": 256 * size, "d_ff": 1024 * size}
        shape |= {"n_heads": 8 * size, "n_kv_heads": 8 * size, "vocab_size": 10_000}
        train["model"] = shape
    return train


def _by_name(said):
    return {name: np.array([row[name] for row in said]) for name in said[0]}


def _formulas(config, masters, gib):
    """The relative error of each estimator against `gib`."""
    model, parallel = config["model"], config.get("parallel", {})
    h, layers, v, ff = (model[key] for key in ("d_model", "n_layers", "vocab_size", "d_ff"))
    heads, kv = model["n_heads"], model["n_kv_heads"]
    s, b = config["seq_len"], config["batch_size"]
    t, checkpoint = b * s, config.get("grad_checkpoint", "none")
    tied = model.get("tie_embeddings", False)
    n = v * h * (1 if tied else 2) + h
    n += layers * (h * (2 * h + 2 * h * kv / heads + 3 * ff) + 2 * h)
    wide = config["precision"] in ("fp32", "tf32")
    full, some = checkpoint == "full", checkpoint != "none"
    eager = config.get("attention", {}).get("backend", "auto") == "eager"
    offload = bool(parallel.get("cpu_offload"))
    shards = parallel.get("fsdp", 1) * parallel.get("cp", 1)
    sharded = shards * parallel.get("replicate", 1) > 1 or offload
    gpus = shards if sharded else masters
    parts = gpus if sharded else 1  # what divides the weights
    number = 4 if wide else 2

    largest_matrix = h * (v if v > ff else ff)
    deepspeed = (
        4 * largest_matrix + (0 if offload else 18 * n / gpus) if sharded else 2 * n + 18 * n / gpus
    )
    masters_kept = 12 / gpus if sharded or masters > 1 else 12
    megatron = n * (6 + masters_kept) + 1.05 * t * (34 * h * layers + 8 + h + 2 * (v + h))
    playbook = n * (16 / gpus if sharded else 4 + 12 / gpus if masters > 1 else 16)
    playbook += layers * t * (2 * h if full else 34 * h + (5 * heads * s if eager else 0))
    eleuther = 2 * v * h + h * s + 8 * h * layers + 2 * h
    eleuther += layers * h * (2 * h * (1 + kv / heads) + 3 * ff)
    eleuther *= number / parts + 4 / parts + 12 / gpus
    eleuther += number * (500_000_000 + (1_000_000_000 if sharded else 0)) if gpus > 1 else 0
    eleuther += layers * t * (34 * h + (0 if full else 5 * heads * s))
    poor = layers * t * (number * (16 * h + 6 * ff + 2 * s * heads) + 4 * s * heads + 8)
    poor = (16 if wide else 8) * n + 681_574_400 + (0.15 if some else 1) * poor
    llmem = n * (14 / parts + (2 * (gpus - 1) / gpus if sharded else 0))
    llmem += t * (2 * layers * (3 * h + 2 * h * kv / heads + 2 * ff + h) + 12 * v)
    said = {
        "DeepSpeed": deepspeed,
        "accelerate": (16 if wide else 8) * n,
        "transformers": (16 if wide else 18) * n,
        "Megatron-LM": megatron,
        "Ultra-Scale Playbook": playbook,
        "EleutherAI": eleuther,
        "gpu_poor": poor,
        "LLMem": llmem,
    }
    return {name: found / 2**30 / gib - 1 for name, found in said.items()}
