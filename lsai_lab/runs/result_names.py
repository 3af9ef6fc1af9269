"""The names of results, as notebooks/README.md explains them; `<...>` stands for a word or several.

Who asks a frame for a result that no run in it has gets missing values; for a name that is none of
these, a line that says which may have been meant.
"""

import functools
import re
from collections.abc import Iterable

from lsai_core.base.errors import UserError, no_column

NAMES = [
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "step_ms",
    "steps_timed",
    "warmup_steps",
    "speed_note",
    "mfu",
    "tflops",
    "flops_per_token",
    "mfu_causal",
    "tflops_causal",
    "mfu_peak_tflops",
    "mfu_peak_source",
    "train_loss",
    "validation_loss",
    "validation_perplexity",
    "steps",
    "tokens",
    "resumed_at",
    "train_s",
    "setup_s",
    "first_step_s",
    "warmup_s",
    "mem_<phase>_peak_gib",
    "mem_peak_<kind>_gib",
    "mem_steps_measured",
    "memory_kind",
    "rss_peak_gib",
    "parameters",
    "parameters_non_embedding",
    "kernel_<class>_ms",
    "kernel_note",
    "gpu_busy_ms",
    "gpu_busy_share",
    "exposed_communication_ms",
    "gpu_clock_mhz",
    "gpu_power_w",
    "host_<phase>_ms",
    "host_threads",
    "attention_kernel",
    "fp8_recipe",
    "fp8_layers",
    "fp8_parameter_share",
    "optimizer_kernel",
    "optimizer_rounding",
    "fp8_unavailable",
    "compile_note",
    "weights",
    "dataset",
    "text_tokens",
    "device",
    "device_name",
    "<bench>_device",
    "compute_capability",
    "world_size",
    "framework",
    "versions",
    "command",
    "arguments",
    "ran_beside",
    "other_cores",
    "step_spread",
    "disturbed",
    "largest_batch",
    "largest_batch_tokens",
    "largest_size",
    "search_<fact>",
    "tries",
    "weights_gib",
    "states_gib",
    "allocated_gib",
    "host_gib",
    "estimate_gib",
    "estimated_size",
    "weights_share",
    "d_model",
    "n_layers",
    "loss",
    "step_s",
    "points",
    "points_ok",
    "points_skipped",
    "measuring_s",
    "gemm_s",
    "ceilings_s",
    "<mask>_<length>_<backend>_tflops",
    "auto_worst_share_<pass>",
    "<method>_<length>_tflops",
    "square_<type>_n",
    "square_<type>_tflops",
    "matmul_<type>_tflops",
    "matmul_<type>_<n>_tflops",
    "matmul_<type>_size",
    "copy_gb_per_s",
    "h2d_gb_per_s",
    "d2h_gb_per_s",
    "<operation>_bus_gb_per_s",
]
# Which figure of several: a name may end so.
_ENDING = re.compile(r"(_p25|_p75|_min|_max|_mean|_min_rank|_low|_high)$")

OF_A_TEXT = ("_loss", "_perplexity")  # so end results that are per token of a text
_SPEED = r".*_per_s(_per_gpu)?|(.*_)?(tflops|mfu)(_causal)?"
_MORE_IS_BETTER = re.compile(rf"({_SPEED}|largest_\w+)")
_TIMED = re.compile(rf"({_SPEED}|(.*_)?ms|step_s)")
_LESS_IS_BETTER = re.compile(r"(.*_)?(gib|ms|s|loss|perplexity)")


def more_is_better(name: str) -> bool | None:
    """Whether more of this result is better; None where its name does not say."""
    short = _ENDING.sub("", name)
    if _MORE_IS_BETTER.fullmatch(short):
        return True
    return False if _LESS_IS_BETTER.fullmatch(short) else None


def is_timed(name: str) -> bool:
    """Whether other work on its machine changes this result: a speed or a time of steps."""
    return _TIMED.fullmatch(_ENDING.sub("", name)) is not None


@functools.cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(re.sub(r"<\w+>", r"\\w+", name)) for name in NAMES)


def is_result(name: str) -> bool:
    """Whether a run can have a result of this name."""
    short = _ENDING.sub("", name)
    return any(pattern.fullmatch(text) for pattern in _patterns() for text in (name, short))


def require_known(names: Iterable[str], columns: Iterable[str]) -> None:
    """UserError for a name that is neither one of `columns` nor a result, with the nearest ones."""
    there = list(columns)
    for name in names:
        if name not in there and not is_result(name):
            known = [*there, *(one for one in NAMES if "<" not in one)]
            raise UserError(no_column(name, known))


def is_quality(metric: str) -> bool:
    """Whether a column is a loss or perplexity, which depends on the text and the seed."""
    return metric == "loss" or metric.endswith(OF_A_TEXT)
