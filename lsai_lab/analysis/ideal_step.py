"""The ideal step: a training step's matrix products at the dense peak of the GPU's data sheet, and
nothing else.

Linear layers are 6 FLOPs per parameter and token; attention's are those that a causal mask or a
window needs. Each is divided by the peak of the dtype that it runs in. The data sheet's is the one
bound that no step can exceed: products of library calls that were timed alone ran slower than the
same products within a training step, because the clock follows the power.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lsai_core.config.model import ModelConfig
from lsai_core.config.strict import validated
from lsai_core.fp8.shapes import parameters_in
from lsai_core.profiling.flops import MATMUL_DTYPE, flops_per_token, theoretical_peak
from lsai_lab.runs.records import read_run


@dataclass(frozen=True)
class Ideal:
    """FLOPs of the linear layers in one step by the dtype of their products, and the milliseconds
    that they and attention take at the data sheet's peaks."""

    linear_tflop: dict[str, float]
    linear_ms: float
    attention_ms: float

    @property
    def ms(self) -> float:
        return self.linear_ms + self.attention_ms


def ideal_step(config: Mapping[str, Any], gpu: str) -> Ideal | None:
    """The ideal step of a training config (as in config.json) on one `gpu`; None if no data sheet
    of it is known."""
    model = validated(ModelConfig, dict(config["model"]), "the run's config")
    dtype = MATMUL_DTYPE[config["precision"]]
    flops = flops_per_token(model, config["seq_len"], config["attention"]["window"])
    tokens = config["batch_size"] * config["grad_accum"] * config["seq_len"]
    fp8 = config.get("fp8") or {"recipe": "none"}
    in_fp8 = 0 if fp8["recipe"] == "none" else parameters_in(model, tuple(fp8["layers"]))
    linear = {dtype: flops.counted_parameters - in_fp8, "fp8": in_fp8}
    tflop = {name: 6e-12 * parameters * tokens for name, parameters in linear.items() if parameters}
    attention = (flops.causal_discounted - 6.0 * flops.counted_parameters) * tokens / 1e12
    peaks = {name: theoretical_peak(gpu, name) for name in {*tflop, dtype}}
    if not all(peaks.values()):
        return None
    rate = {name: peak.tflops for name, peak in peaks.items() if peak}
    linear_ms = 1e3 * sum(work / rate[name] for name, work in tflop.items())
    return Ideal(tflop, linear_ms, attention_ms=1e3 * attention / rate[dtype])


def ideal_of(row: Mapping[str, Any]) -> Ideal | None:
    """The ideal step of a row of `lab.load`."""
    gpu = row.get("env.gpu")
    return ideal_step(read_run(Path(row["run"])).config, gpu) if isinstance(gpu, str) else None
