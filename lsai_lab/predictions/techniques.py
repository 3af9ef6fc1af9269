"""One training task under every technique that saves memory, from the least change to the largest:
which is the first that fits?"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lsai_core.config.strict import deep_merge, flatten
from lsai_core.config.train import TrainConfig
from lsai_core.prediction.memory import Prediction, predict, verdict
from lsai_core.profiling.gpus import Gpu
from lsai_core.training.combinations import refusal

_PLAIN: dict[str, Any] = {
    "precision": "bf16",
    "loss": "full",
    "blocks": "plain",
    "grad_checkpoint": "none",
    "fp8": {"recipe": "none"},
    "attention": {"backend": "auto"},
    "compile": True,
    "parallel": {},
    "optim": {"states": "full"},
}
_FUSED = deep_merge(_PLAIN, {"loss": "fused", "blocks": "fused"})
_FULL = _FUSED | {"grad_checkpoint": "full"}
_FP32 = _FUSED | {"precision": "bf16_autocast"}  # 16 bytes a parameter instead of 8

# Name and settings, over the task's own model, sequence length, batch and window. Weights,
# gradients and moments are in bf16, where no other states are named. Sharded rows are fused, too.
# fp8 is left out on GPUs without it.
TECHNIQUES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nothing fused", _PLAIN),
    ("fused loss and blocks", _FUSED),
    ("fused, fp32 states", _FP32),
    ("fused, 8-bit AdamW", _FUSED | {"optim": {"states": "8bit", "kernel": "auto"}}),
    ("fused, fp8 matmuls", _FUSED | {"fp8": {"recipe": "fused"}}),
    ("fused, selective checkpointing", _FUSED | {"grad_checkpoint": "selective"}),
    ("fused, alternating checkpointing", _FUSED | {"grad_checkpoint": "alternating"}),
    ("fused, full checkpointing", _FULL),
    (
        "fused, full checkpointing, 8-bit AdamW",
        _FULL | {"optim": {"states": "8bit", "kernel": "auto"}},
    ),
    ("fused, full checkpointing, CPU offload", _FULL | {"parallel": {"cpu_offload": True}}),
    *(
        (f"FSDP, {gpus} GPUs{also}", base | {"parallel": {"fsdp": gpus}})
        for gpus in (2, 4, 8, 64)
        for also, base in (("", _FUSED), (", full checkpointing", _FULL))
    ),
    ("FSDP, 8 GPUs, fp32 states", _FP32 | {"parallel": {"fsdp": 8}}),
    (
        "FSDP, 2 GPUs, checkpointing, CPU offload",
        _FULL | {"parallel": {"fsdp": 2, "cpu_offload": True}},
    ),
)


@dataclass(frozen=True)
class Technique:
    """A technique, the config that it leads to, and what that is predicted to need."""

    name: str
    config: TrainConfig
    prediction: Prediction


def compare(
    task: TrainConfig,
    gpu: Gpu | None = None,
    on_next: Callable[[str], object] = lambda name: None,
    techniques: Sequence[str] | None = None,
) -> list[Technique]:
    """`task` as it stands (`as configured`) and under each technique that `gpu` and the model's
    shape allow. `techniques`: only those named (of none: all), without the task as it stands.
    `on_next` is told each name before its prediction, which takes seconds."""
    rows = []
    if techniques is None:
        on_next("as configured")
        rows.append(Technique("as configured", task, predict(task)))
    for name, settings in TECHNIQUES:
        if techniques and name not in techniques:
            continue
        on_next(name)
        if "fp8" in name and gpu is not None and not gpu.fp8:
            continue
        data = deep_merge(task.model_dump(), settings) | {"parallel": settings["parallel"]}
        config = TrainConfig.model_validate(data)
        if refusal(config):  # fp8 takes multiples of 16 only
            continue
        rows.append(Technique(name, config, predict(config)))
    return rows


def settings_of(task: TrainConfig, technique: Technique) -> list[str]:
    """The settings in which `technique` differs from `task`, as `--set` takes them."""
    before, after = (
        flatten(task.model_dump(mode="json")),
        flatten(technique.config.model_dump(mode="json")),
    )
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in changed.items()
    ]


def first_that_fits(rows: list[Technique], gpu: Gpu) -> Technique | None:
    """The first row whose peak fits `gpu`."""
    return next((row for row in rows if verdict(row.prediction, gpu) == "fits"), None)
