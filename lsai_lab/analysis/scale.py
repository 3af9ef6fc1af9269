"""What a training job moves, keeps and waits for on many nodes: the formulas of the chapter on many
nodes.

Communication is the alpha-beta model (Hockney 1994; Thakur et al. 2005): a ring collective of n
ranks over a buffer of S bytes takes (n - 1) alpha + (n - 1)/n S / B to gather or to reduce-scatter,
and twice that to all-reduce. A step of FSDP gathers each unit once or twice and reduce-scatters it
once, over the shard group; HSDP adds an all-reduce of each gradient shard over the replicas
(`lsai_core.prediction.exchanges`).
"""

import itertools
from dataclasses import dataclass
from typing import Any

import pandas as pd
from pydantic import Field

from lsai_core.config.model import ModelConfig
from lsai_core.config.parallel import ParallelConfig
from lsai_core.config.precision import weight_dtype
from lsai_core.config.strict import Strict, validated
from lsai_core.config.train import Precision, TrainConfig
from lsai_core.model.transformer import count_parameters
from lsai_core.optimizers.kinds.adamw import bytes_per_parameter
from lsai_core.prediction.exchanges import exchanges, units
from lsai_core.profiling.flops import flops_per_token
from lsai_lab.project.files import load_yaml, repo_root

CALLS = ("all_gather", "reduce_scatter", "all_reduce")


class Assumptions(Strict):
    """What one machine cannot measure: replace each by what your own cluster shows. Rates are per
    direction."""

    gpus_per_node: int = Field(4, gt=0)
    nvlink_gb_per_s: float = Field(
        150.0, gt=0, description="per GPU, to the other GPUs of its node"
    )
    network_gb_per_s: float = Field(
        25.0, gt=0, description="per GPU, to other nodes (one adapter per GPU)"
    )
    nvlink_latency_us: float = Field(5.0, ge=0, description="one step of a ring within a node")
    network_latency_us: float = Field(
        15.0, ge=0, description="one step of a ring that crosses nodes"
    )
    filesystem_gb_per_s: float = Field(
        100.0, gt=0, description="the whole file system, shared by all ranks"
    )
    memory_for_states_gib: float = Field(
        48.0, gt=0, description="of a GPU: weights, gradients and optimizer states"
    )
    node_mtbf_days: float = Field(
        1000.0, gt=0, description="mean time between failures of one node"
    )
    restart_minutes: float = Field(10.0, ge=0, description="from a failure until training goes on")
    peak_tflops: float = Field(989.5, gt=0, description="dense bf16 peak of one GPU")
    mfu: float = Field(
        0.4, gt=0, le=1, description="used only where no recorded run on a GPU tells"
    )
    tokens_per_gpu: int = Field(8192, gt=0, description="per optimizer step")
    seq_len: int = Field(8192, gt=0)


class ScaleConfig(Strict):
    """`params/scale.yaml`: which models, on how many nodes."""

    precision: Precision = "bf16_autocast"
    shapes: dict[str, ModelConfig]
    nodes: list[int]
    shard_nodes: list[int] = Field(description="HSDP: nodes that share one copy of the model")
    assume: Assumptions = Assumptions()


def scale_config() -> ScaleConfig:
    """What is computed here, of `params/scale.yaml`. Raises UserError for what is wrong in it."""
    return validated(
        ScaleConfig, load_yaml(repo_root() / "params" / "scale.yaml"), "params/scale.yaml"
    )


@dataclass(frozen=True)
class Traffic:
    """One optimizer step on one process, by collective: bytes of the full buffers, number of calls,
    and bytes that each process sends in rings."""

    shard: int
    replicas: int
    bytes: dict[str, float]
    calls: dict[str, float]
    sent: dict[str, float]


def step_traffic(
    model: ModelConfig, shard: int, replicas: int, precision: Precision = "bf16_autocast"
) -> Traffic:
    """What one step moves under FSDP over `shard` processes with `replicas` copies of the model."""
    parallel = ParallelConfig(fsdp=shard, replicate=replicas)
    moved = list(exchanges(TrainConfig(model=model, precision=precision, parallel=parallel)))
    found = {name: [one for one in moved if one.operation == name] for name in CALLS}
    return Traffic(
        shard,
        replicas,
        bytes={name: sum(one.calls * one.size for one in all_) for name, all_ in found.items()},
        calls={name: sum(one.calls for one in all_) for name, all_ in found.items()},
        sent={name: sum(one.sent for one in all_) for name, all_ in found.items()},
    )


def state_bytes(model: ModelConfig, shard: int, precision: Precision = "bf16_autocast") -> int:
    """Bytes of weights, gradients and both AdamW moments on one GPU."""
    elements = sum(unit.elements * unit.count for unit in units(model, shard))
    return elements // shard * 4 * weight_dtype(precision).itemsize


def bytes_per_weight(precision: Precision, states: str = "full") -> tuple[int, float]:
    """Bytes that one weight of a matrix takes, and those of its gradient and of AdamW's `states`
    (`optim.states`) together."""
    dtype = weight_dtype(precision)
    return dtype.itemsize, dtype.itemsize + bytes_per_parameter(states, dtype)


def step_seconds(traffic: Traffic, assume: Assumptions) -> tuple[float, float]:
    """(bandwidth, latency) seconds of communication per step, nothing hidden behind computation.

    A shard group beyond one node runs one ring per network adapter, so it moves `gpus_per_node`
    times one adapter's rate, at most NVLink's; the replicas of one shard sit on different nodes,
    one adapter each.
    """
    a, n, r = assume, traffic.shard, traffic.replicas
    within = n <= a.gpus_per_node
    rate = (
        a.nvlink_gb_per_s
        if within
        else min(a.nvlink_gb_per_s, a.gpus_per_node * a.network_gb_per_s)
    )
    hop_us = a.nvlink_latency_us if within else a.network_latency_us
    (gathered, scattered, reduced), calls = (traffic.sent[name] for name in CALLS), traffic.calls
    hops_us = (calls["all_gather"] + calls["reduce_scatter"]) * (n - 1) * hop_us
    hops_us += calls["all_reduce"] * 2 * (r - 1) * a.network_latency_us
    return ((gathered + scattered) / rate + reduced / a.network_gb_per_s) / 1e9, hops_us / 1e6


def groupings(config: ScaleConfig, assume: Assumptions) -> pd.DataFrame:
    """One row per model, number of nodes and way to group the GPUs: what each GPU keeps, sends and
    waits for in a step.

    Columns: `model`, `nodes`, `plan`, `shard` and `replicas` (GPUs), `states_gib`, `sent_gb`,
    `moving_s`, `waiting_s`, `communication_s` (their sum), `compute_s` (the step's FLOPs at
    `assume.mfu`), and `share`, communication over computation.
    """
    rows: list[dict[str, Any]] = []
    for (name, model), nodes in itertools.product(config.shapes.items(), config.nodes):
        gpus, flops = (
            nodes * assume.gpus_per_node,
            flops_per_token(model, assume.seq_len).convention,
        )
        plans = {gpus: "FSDP, all GPUs"}
        for group in config.shard_nodes:
            plans.setdefault(
                group * assume.gpus_per_node, f"HSDP, {group} node{'s' if group > 1 else ''}"
            )
        for shard, plan in plans.items():
            if gpus % shard == 0:
                traffic = step_traffic(model, shard, gpus // shard, config.precision)
                moving, waiting = step_seconds(traffic, assume)
                row = {
                    "model": name,
                    "nodes": nodes,
                    "plan": plan,
                    "shard": shard,
                    "replicas": gpus // shard,
                }
                row["states_gib"] = state_bytes(model, shard, config.precision) / 2**30
                row |= {
                    "sent_gb": sum(traffic.sent.values()) / 1e9,
                    "moving_s": moving,
                    "waiting_s": waiting,
                }
                row["compute_s"] = (
                    assume.tokens_per_gpu * flops / assume.mfu / assume.peak_tflops / 1e12
                )
                rows.append(row)
    frame = pd.DataFrame(rows)
    frame["communication_s"] = frame["moving_s"] + frame["waiting_s"]
    return frame.assign(share=frame["communication_s"] / frame["compute_s"])


def recorded_node(config: ScaleConfig, runs: pd.DataFrame) -> tuple[Assumptions, pd.Series]:
    """The assumptions with what a run on one node measured (rate within the node, MFU, tokens), and
    that run: the first good, traced one of `runs` (study fsdp) in bf16 that trains a whole model of
    `config` sharded over a node."""
    sizes = {count_parameters(shape).total: shape for shape in config.shapes.values()}
    fits = (runs["outcome"] == "ok") & (runs["fp8.recipe"] == "none")
    fits &= (runs["grad_checkpoint"] == "none") & runs["kernel_communication_ms"].notna()
    fits &= runs["parallel.fsdp"] == config.assume.gpus_per_node
    fits &= runs["parallel.reshard_after_forward"].eq(True) & runs["parameters"].isin(sizes)
    run = runs[fits].iloc[0]
    model = sizes[run["parameters"]]
    traffic = step_traffic(model, config.assume.gpus_per_node, 1, run["precision"])
    measured = {
        "nvlink_gb_per_s": sum(traffic.sent.values()) / run["kernel_communication_ms"] / 1e6,
        "mfu": run["mfu"],
        "tokens_per_gpu": int(run["batch_size"] * run["seq_len"]),
        "seq_len": int(run["seq_len"]),
    }
    return config.assume.model_copy(update=measured), run


def best_groupings(groups: pd.DataFrame, assume: Assumptions) -> pd.DataFrame:
    """Of `groupings` the plan with the least communication for each model and number of nodes,
    among those whose states fit."""
    fits = groups[groups["states_gib"] <= assume.memory_for_states_gib]
    return fits.loc[fits.groupby(["model", "nodes"], sort=False)["communication_s"].idxmin()]


def enough_tokens(
    config: ScaleConfig, assume: Assumptions, nodes: int, links: list[float]
) -> pd.DataFrame:
    """One row per model and rate of a link between nodes (`links`, GB/s): in the best grouping of
    `nodes` nodes the tokens per GPU and step, `enough`, from which computation takes longer than
    communication."""
    rows = []
    for link in links:
        given = assume.model_copy(update={"network_gb_per_s": link})
        best = best_groupings(groupings(config, given), given)
        rows.append(best[best["nodes"] == nodes].assign(link=link))
    found = pd.concat(rows, ignore_index=True)
    return found.assign(enough=found["share"] * assume.tokens_per_gpu)


def group_size(model: ModelConfig, gpus: int, assume: Assumptions) -> float:
    """n*: the GPUs of a group for which latency and bytes together are least."""
    parameters = count_parameters(model).total
    alpha = assume.network_latency_us * 1e-6
    units = model.n_layers + 2
    moved = 8 * parameters / assume.network_gb_per_s / 1e9
    return float(((moved + 2 * units * gpus * alpha) / (3 * units * alpha)) ** 0.5)


def checkpoint_costs(config: ScaleConfig, assume: Assumptions) -> pd.DataFrame:
    """One row per model and number of nodes: seconds to save (`write_s`: weights and two moments),
    between failures (`failure_s`), and of the best interval (`interval_s`); and the shares of the
    time that saving and repeating (`repeated`), restarts (`restarting`) and all (`lost`) take."""
    rows = []
    for (name, model), nodes in itertools.product(config.shapes.items(), config.nodes):
        saved = 3 / 4 * state_bytes(model, 1, config.precision)  # without gradients
        row = {"model": name, "nodes": nodes, "write_s": saved / assume.filesystem_gb_per_s / 1e9}
        rows.append(row | {"failure_s": assume.node_mtbf_days * 86400 / nodes})
    costs = pd.DataFrame(rows)
    costs["restarting"] = assume.restart_minutes * 60 / costs["failure_s"]
    costs["interval_s"] = (2 * costs["write_s"] * costs["failure_s"]) ** 0.5
    half = costs["interval_s"] / 2 / costs["failure_s"]
    costs["repeated"] = costs["write_s"] / costs["interval_s"] + half
    return costs.assign(lost=costs["repeated"] + costs["restarting"])
