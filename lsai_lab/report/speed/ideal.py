"""The ideal step: its matrix products at the ceiling of the machine, and nothing else.

A step's FLOPs split into linear layers (6 per parameter and token) and attention, of which a causal mask or a window needs a
part only. Each part is divided by the ceiling of the dtype that it runs in: fp8 for the layers that fp8 converts, otherwise the
run's precision. The ceiling is the one that the `machine` study measured on the same machine, or the data sheet's, said so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lsai_core.config import ModelConfig
from lsai_core.profiling.flops import MATMUL_DTYPE, flops_per_token, matmul_parameters, theoretical_peak
from lsai_core.strict import validated
from lsai_lab.report.show import run_link
from lsai_lab.runs.records import Run


@dataclass(frozen=True)
class Ceilings:
    """Where a machine's ceilings come from: its `machine` record, if there is one, and its GPU's name."""

    record: Run | None
    gpu: str | None

    def tflops(self, dtype: str) -> float | None:
        """The ceiling of matrix products in `dtype` (TFLOP/s), measured before data sheet; None if neither is known."""
        measured = self.record.summary.results.get(f"matmul_{dtype}_tflops") if self.record else None
        if measured:
            return float(measured)
        sheet = theoretical_peak(self.gpu, dtype) if self.gpu else None
        return sheet.tflops if sheet else None

    def source(self, dtype: str) -> str:
        """The ceiling in words, with its origin."""
        value = self.tflops(dtype)
        if value is None:
            return f"no ceiling is known for {dtype}"
        measured = self.record is not None and self.record.summary.results.get(f"matmul_{dtype}_tflops")
        origin = run_link("measured", self.record.summary.id.key) if measured and self.record else "data sheet"
        return f"{value:,.4g} TFLOP/s in {dtype} ({origin})"


@dataclass(frozen=True)
class Ideal:
    """Milliseconds of an ideal step, and the dtypes whose ceilings it was computed with."""

    matmul_ms: float
    attention_ms: float
    dtypes: tuple[str, ...]

    @property
    def ms(self) -> float:
        return self.matmul_ms + self.attention_ms


def ideal_step(config: Mapping[str, Any], ceilings: Ceilings) -> Ideal | None:
    """The ideal step of a training config (as in config.json); None if a ceiling is not known."""
    model = validated(ModelConfig, dict(config["model"]), "the run's config")
    dtype = MATMUL_DTYPE[config["precision"]]
    flops = flops_per_token(model, config["seq_len"], config["attention"]["window"])
    attention = (flops.windowed or flops.causal_discounted) - 6.0 * flops.counted_parameters
    in_fp8 = fp8_parameters(model, config.get("fp8") or {})
    plain = ceilings.tflops(dtype)
    fast = ceilings.tflops("fp8") if in_fp8 else plain
    if plain is None or fast is None:
        return None
    tokens = config["batch_size"] * config["grad_accum"] * config["seq_len"]
    linear_s = 6.0 * in_fp8 / (fast * 1e12) + 6.0 * (flops.counted_parameters - in_fp8) / (plain * 1e12)
    dtypes = (dtype, "fp8") if in_fp8 else (dtype,)
    return Ideal(tokens * linear_s * 1e3, tokens * attention / (plain * 1e12) * 1e3, dtypes)


def linear_tflops(config: Mapping[str, Any], matmul_ms: float) -> float:
    """TFLOP/s of a step's linear layers if they took `matmul_ms`."""
    model = validated(ModelConfig, dict(config["model"]), "the run's config")
    tokens = config["batch_size"] * config["grad_accum"] * config["seq_len"]
    return 6.0 * matmul_parameters(model) * tokens / (matmul_ms * 1e-3) / 1e12


def fp8_parameters(model: ModelConfig, fp8: Mapping[str, Any]) -> int:
    """Parameters of the linear layers whose products run in fp8 under this `fp8` config."""
    if fp8.get("recipe", "none") == "none":
        return 0
    width, heads, kv_heads = model.d_model, model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    block = {
        "qkv": width * (heads + 2 * kv_heads),
        "attention_output": heads * width,
        "gate_up": 2 * width * model.d_ff,
        "down": model.d_ff * width,
    }
    output = model.vocab_size * width if "output" in fp8["layers"] else 0
    return model.n_layers * sum(size for name, size in block.items() if name in fp8["layers"]) + output
