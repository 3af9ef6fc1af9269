"""A training step of the model that a Hugging Face `config.json` describes, by transformers' own
code on a simulated GPU.

For models that are not this package's. What transformers is installed decides what is simulated:
its attention, its loss, its masks. The step is a plain one: fused AdamW, gradients clipped, no
cache of keys and values, labels as long as the input. Nothing of the file runs: only classes that
transformers itself has are built, from the file's plain values.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lsai_core.base.errors import Unavailable, UserError
from lsai_core.model.hf_config import CONFIG, read_json
from lsai_core.profiling.gpus import Gpu

STEPS = 2  # the optimizer's states come with the first
INSTALL = "pip install transformers"
# What decides how weights are stored or loaded, or which kernel a machine had, not the model.
_LEFT_OUT = (
    *("quantization_config", "attn_implementation", "_attn_implementation", "auto_map"),
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"),
)
# The kinds of models that can be trained, in the order in which they are looked for, with the
# input that each takes.
_KINDS = {
    "CAUSAL_LM": "text",
    "SEQ_TO_SEQ_CAUSAL_LM": "text",
    "MASKED_LM": "text",
    "SPEECH_SEQ_2_SEQ": "sound",
    "IMAGE_TEXT_TO_TEXT": "text",
    "IMAGE_CLASSIFICATION": "pictures",
    "AUDIO_CLASSIFICATION": "wave",
}
_SECONDS, _RATE = 5, 16_000  # of a sound wave


@dataclass(frozen=True)
class HfStep:
    """The step to predict. `precision`: bf16 (weights and states, too), bf16_autocast, or fp32."""

    seq_len: int
    batch_size: int
    precision: str = "bf16"
    recompute: bool = False
    accumulate: int = 1


@dataclass(frozen=True)
class HfModel:
    """A model class of transformers, its configuration, what it takes, and remarks."""

    build: Callable[..., Any]
    config: Any
    takes: str
    remarks: tuple[str, ...]


def hf_model(path: Path) -> HfModel:
    """The model that the config.json at `path`, or in the folder `path`, describes.

    Raises Unavailable without transformers, and UserError, one line, for a model that the installed
    version does not know, or values that its configuration does not take.
    """
    transformers = _transformers()
    path = path / CONFIG if path.is_dir() else path
    data = read_json(path)
    kind = data.get("model_type")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in known:
        raise UserError(
            f"{path}: model_type {str(kind)[:60]!r} is not known to transformers "
            f"{transformers.__version__}"
            + ("; code beside the file (auto_map) never runs" if data.get("auto_map") else "")
        )
    values = {key: value for key, value in data.items() if key not in _LEFT_OUT}
    with _values_of(path):
        config = known[kind].from_dict(values)
    build, takes = _class_of(transformers, config, data, path)
    remarks = [f"the step is that of transformers {transformers.__version__}, as installed here"]
    if data.get("quantization_config"):
        remarks.append(
            "quantization_config is left out: this is training of all weights, not quantized"
        )
    if takes == "text" and hasattr(config, "vision_config"):
        remarks.append("the batch is text alone, without pictures")
    return HfModel(build, config, takes, tuple(remarks))


def _transformers() -> Any:
    try:
        import transformers
        import transformers.models.auto.modeling_auto
    except ImportError:
        raise Unavailable(
            f"models that are not this package's are predicted by their own code: {INSTALL}"
        ) from None
    transformers.logging.set_verbosity_error()
    return transformers


@contextlib.contextmanager
def _values_of(path: Path) -> Iterator[None]:
    """One line instead of whatever transformers makes of values that it cannot use."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # tells every error at length
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"{path}: transformers cannot train a model of it ({reason})") from None
    finally:
        logger.setLevel(level)


def _class_of(
    transformers: Any, config: Any, data: Mapping[str, Any], path: Path
) -> tuple[Callable[..., Any], str]:
    """What builds the model, and what it takes: the kind that the file's `architectures` name, else
    the first in which transformers has one."""
    auto = transformers.models.auto.modeling_auto
    names: dict[str, Any] = {
        kind: getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}).get(config.model_type)
        for kind in _KINDS
    }
    wanted = data.get("architectures") or []
    order = sorted(_KINDS, key=lambda kind: names[kind] not in wanted)
    for kind in order:
        known = names[kind]
        name = known[0] if isinstance(known, tuple | list) else known
        if name is not None:
            return getattr(transformers, name)._from_config, _KINDS[kind]
    raise UserError(
        f"{path}: model_type {config.model_type!r} has no class in transformers "
        f"{transformers.__version__} that trains on text, sound or pictures"
    )


def predict_hf(model: HfModel, step: HfStep, gpus: Sequence[Gpu], path: Path) -> dict[str, Any]:
    """GiB of a training step on the first of `gpus`, simulated, as plain values: peaks, phases,
    causes, verdicts for all of them, the number of parameters, and the attention that transformers
    chose. UserError as `simulated_gpu`."""
    import torch

    from lsai_core.prediction.gpu_context import SimulatedGpu

    with _values_of(path), SimulatedGpu(gpus[0]) as found:
        built = _built(model, step)
        count = {id(p): p.numel() for p in built.parameters()}
        run = _step(built, _inputs(model, step), step)
        optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4, fused=True)
        for _ in range(STEPS):
            run(optimizer)
    return {
        "parameters": sum(count.values()),
        "attention": getattr(model.config, "_attn_implementation", None) or "its own",
        "allocated_gib": found.peak_allocated_gib,
        "reserved_gib": found.peak_reserved_gib,
        "phases_gib": found.phases,
        "causes_gib": found.operators,
        "gpus": [
            {
                "GPU": gpu.name,
                "memory GiB": gpu.memory_gib,
                "share": found.peak_reserved_gib / gpu.memory_gib,
                "verdict": found.verdict_on(gpu),
            }
            for gpu in gpus
        ],
    }


def _built(model: HfModel, step: HfStep) -> Any:
    import torch

    dtype = torch.bfloat16 if step.precision == "bf16" else torch.float32
    model.config.use_cache = False
    with torch.device("cuda"):
        built = model.build(model.config, dtype=dtype)
    built.train()
    if step.recompute:
        if not built.supports_gradient_checkpointing:
            raise UserError("this model of transformers has no gradient checkpointing")
        enable = "activation_checkpointing_enable"  # its newer name
        if not hasattr(built, enable):
            enable = "gradient_checkpointing_enable"
        getattr(built, enable)()
    return built


def _inputs(model: HfModel, step: HfStep) -> dict[str, Any]:
    """A batch on the simulated GPU, by the names of the model's arguments."""
    import torch

    config, batch = model.config, step.batch_size
    text = config.get_text_config(decoder=True)
    dtype = torch.bfloat16 if step.precision == "bf16" else torch.float32

    def ids(length: int, most: int) -> Any:
        return torch.randint(most, (batch, length), device="cuda")

    if model.takes == "pictures":
        size = getattr(config, "image_size", 224)
        high, wide = (size, size) if isinstance(size, int) else size
        pictures = torch.empty(
            (batch, getattr(config, "num_channels", 3), high, wide), dtype=dtype, device="cuda"
        )
        return {"pixel_values": pictures, "labels": ids(1, config.num_labels)[:, 0]}
    if model.takes == "wave":
        wave = torch.empty((batch, _SECONDS * _RATE), dtype=dtype, device="cuda")
        return {"input_values": wave, "labels": ids(1, config.num_labels)[:, 0]}
    if model.takes == "sound":
        mels = getattr(config, "num_mel_bins", 80)
        frames = 2 * getattr(config, "max_source_positions", 1500)
        sound = torch.empty((batch, mels, frames), dtype=dtype, device="cuda")
        return {"input_features": sound, "labels": ids(step.seq_len, config.vocab_size)}
    tokens = ids(step.seq_len, text.vocab_size)
    return {"input_ids": tokens, "labels": tokens}


def _step(built: Any, inputs: dict[str, Any], step: HfStep) -> Callable[[Any], None]:
    import torch

    def run(optimizer: Any) -> None:
        for _ in range(step.accumulate):
            with torch.autocast(
                "cuda", dtype=torch.bfloat16, enabled=step.precision == "bf16_autocast"
            ):
                loss = built(**inputs).loss
            (loss / step.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(built.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run
