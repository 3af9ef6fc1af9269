"""`lab.predict`: memory and time of a training run on any GPU, as `lsai predict` computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import nn

from lsai_core.base.errors import UserError, hint
from lsai_core.base.shown import Shown
from lsai_core.base.tables import Part, value
from lsai_core.config.model import ModelConfig
from lsai_core.config.precision import weight_dtype
from lsai_core.config.strict import deep_merge
from lsai_core.config.train import TrainConfig
from lsai_core.prediction.simulate import simulate
from lsai_core.profiling.gpus import Gpu
from lsai_core.training.combinations import checked
from lsai_lab.interactive.asked import gpu_words, require_numbers, said_in_python, source_of
from lsai_lab.interactive.planning import as_nested
from lsai_lab.predictions.asked import Source, asked_for, describe, shared_by, sizes_that_exist
from lsai_lab.predictions.will_fit import expected_kernel, largest_batch, longest, will_fit
from lsai_lab.report.load import AnyRun
from lsai_lab.report.predicted import config as config_of_run
from lsai_lab.report.show import Picture
from lsai_lab.report.timelines import memory_picture
from lsai_lab.runs.frames import Frame, Values

_LARGEST = ("batch", "length")
# What a table for people calls the columns of `gpus`.
_WORDS = {"gpu": "GPU", "memory_gib": "memory GiB", "step_s": "step s", "tokens_per_s": "tokens/s"}


class Predicted(Shown):
    """A prediction: `answer` in words, `config`, and in GiB `peak_gib`, `needs_gib` (what the
    allocator must have), `host_gib` (host memory, a GPU), `memory` (the peak by cause) and `phases`
    (the peak of each); `gpus`: one row a GPU; `remarks`: what one may not have asked for; a
    picture: `plot()`."""

    def __init__(
        self, config: TrainConfig, found: Mapping[str, Any], remarks: Sequence[str] = ()
    ) -> None:
        self.config = config
        self.remarks = [*remarks, *found["remarks"]]
        self.answer: str = found["answer"]
        self.peak_gib: float = found["peak_gib"]
        self.needs_gib: float = found["needs_gib"]
        self.host_gib: float = found["host_gib"]
        self.memory = Values(found["parts_gib"], name="GiB")
        self.phases = Values(found["phases_gib"], name="GiB")
        self.gpus = Frame(found["gpus"]).rename(
            columns={words: name for name, words in _WORDS.items()}
        )

    @property
    def batch_size(self) -> int:
        """Sequences per GPU and micro-batch."""
        return self.config.batch_size

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return self.config.seq_len

    @property
    def step_s(self) -> float | None:
        """Seconds of a step on the one GPU; None where none is known. UserError for several."""
        return self._of_one("step_s")

    @property
    def tokens_per_s(self) -> float | None:
        """Of all GPUs together, on the one kind of GPU; None where none is known. UserError for
        several."""
        return self._of_one("tokens_per_s")

    def _of_one(self, name: str) -> float | None:
        if len(self.gpus) > 1:
            raise UserError(f"{name} is one number a GPU: see .gpus, or name a GPU")
        found = self.gpus[name].iloc[0]
        return None if pd.isna(found) else float(found)

    @property
    def fits(self) -> bool:
        """Whether it fits one of the GPUs."""
        return bool((self.gpus["verdict"] != "too large").any())

    @property
    def _frame_of_it(self) -> pd.DataFrame:
        return self.gpus

    def plot(self) -> Picture:
        """The memory of a simulated step by cause, of the first process, without messages and
        libraries. Takes as long as the prediction."""
        moments: list[tuple[str, dict[str, int]]] = []
        simulate(self.config, self.gpus["attention"].iloc[0], moments=moments)
        return Picture(memory_picture(moments, title="Memory of a step by cause, simulated"))

    def _parts(self) -> list[Part]:
        """The answer, the peak by cause, the GPUs."""
        about = "; ".join([describe(self.config), _assumed(self.config), *self.remarks])
        parts = [(name, size) for name, size in self.memory.items() if size]
        gpus = self.gpus.assign(share=self.gpus["share"].map("{:.0%}".format))
        rows = gpus.astype(object).where(gpus.notna(), None).values.tolist()
        needs = f"the allocator needs {value(self.needs_gib)} GiB"
        needs += f"; in host memory, a GPU: {value(self.host_gib)} GiB" if self.host_gib else ""
        return [
            Part(self.answer, note=about),
            Part(f"Peak of {value(self.peak_gib)} GiB; {needs}", ("cause", "GiB"), parts),
            Part("", [_WORDS.get(name, name) for name in gpus.columns], rows),
        ]


def _assumed(config: TrainConfig) -> str:
    """What a step does and keeps, in words that one may not have asked for."""
    many = f"{config.grad_accum} micro-batches" if config.grad_accum > 1 else "1 micro-batch"
    sequences = "1 sequence" if config.batch_size == 1 else f"{config.batch_size} sequences"
    dtype = "bf16" if weight_dtype(config.precision) == torch.bfloat16 else "fp32"
    states = "8-bit states" if config.optim.states == "8bit" else f"{dtype} states"
    return f"a step is {many} of {sequences}, with {dtype} weights and {states}"


def predict(
    what: str | TrainConfig | ModelConfig | AnyRun | None = None,
    gpu: str | float | None = None,
    *,
    study: str | None = None,
    variant: str | None = None,
    hf: str | Path | None = None,
    gpus: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    passport: str | Path | None = None,
    profile: str | None = None,
    largest: Literal["batch", "length"] | None = None,
) -> Predicted:
    """Peak memory by cause and time of a step, computed without a GPU.

    `what`: a preset (`"llama3-8b"`, in bf16 and compiled), else `"study.variant"`, a training run
    (as `lab.find_run` finds it), the folder or file of a Hugging Face config, a TrainConfig, or a
    ModelConfig, as of a preset; or name a `study` and `variant`, or that folder with `hf`. `gpu`: a
    name as in `lsai predict`, or its memory ("24GiB", or 24); None: all known ones. `gpus`: how
    many in all, which FSDP shares as far as `overrides` leave it. `overrides`: settings with dots.
    `passport`: a file of `lsai probe`, for the device that it was measured on, at its rates.
    `largest`: the largest batch, or longest sequence, that fits one GPU, this machine's if none is
    named. Raises UserError for what cannot be predicted.

    >>> found = lab.predict("llama3-8b", "h100", overrides={"grad_checkpoint": "full"})
    >>> print(found.fits, round(found.memory["weights"], 1))
    True 15.0
    """
    require_numbers({"gpus": gpus}, Integral, "a whole number of at least 1")
    if largest is not None and largest not in _LARGEST:
        raise UserError(
            f"largest is batch or length, not {largest!r}{hint(str(largest), _LARGEST)}"
        )
    named = {"study": study, "variant": variant, "hf": hf, "profile": profile}
    if what is None and study is None and hf is None:
        raise UserError('say what to predict: lab.predict("llama3-8b"), or "memory.bf16", or hf')
    if isinstance(what, nn.Module):
        raise UserError(
            "a model of your own is predicted with its loop: "
            'with lab.simulated_gpu("h100") as gpu: ...'
        )
    with said_in_python():
        measured = None if passport is None else Path(passport)
        targets = asked_for(gpu_words(gpu, what), measured, largest is not None)
        source = source_of(what, named)
        changes, remarks = as_nested(overrides or {}), list[str]()
        if isinstance(source, Source):
            target = targets[0] if gpu is not None or passport else None
            found = source.run(target, gpus, changes)
            config, remarks = found.config, found.remarks
        else:
            config = _changed(source, gpus, changes)
        with sizes_that_exist(config):
            if largest is not None:
                config = _largest(config, targets[0], largest)
            return Predicted(config, will_fit(config, targets), remarks)


def _changed(asked: Any, gpus: int | None, changes: dict[str, Any]) -> TrainConfig:
    """A TrainConfig, or that of a run, with changes."""
    config = asked if isinstance(asked, TrainConfig) else config_of_run(asked)
    data = deep_merge(config.model_dump(), shared_by(gpus, changes, config.parallel))
    return checked(TrainConfig, data, "the run")


def _largest(config: TrainConfig, gpu: Gpu, what: str) -> TrainConfig:
    def kernel_of(asked: TrainConfig) -> str | None:
        return expected_kernel(asked, gpu, None)

    if what == "batch":
        return largest_batch(config, gpu, kernel_of)
    return longest(config, gpu, kernel_of)[0]
