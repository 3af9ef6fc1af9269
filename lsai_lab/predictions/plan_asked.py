"""What a plan is asked for, checked before the work begins: the run, the tokens of a step, the
memory."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast, get_args

from tqdm import tqdm

from lsai_core.base.errors import UserError, hint
from lsai_core.config.train import TrainConfig
from lsai_core.model.hf_config import AnotherModel
from lsai_core.prediction.kernel import not_there
from lsai_core.profiling.gpus import MARGIN, Gpu, find_gpu
from lsai_lab.machine.environment import gpu_facts
from lsai_lab.predictions.asked import Source, gpu_called, sizes_that_exist
from lsai_lab.predictions.plan import Plan, make_plan
from lsai_lab.predictions.plan_predicted import OnNext, Room, gpu_with
from lsai_lab.predictions.plan_space import Numerics, batches, with_usual_vocabulary
from lsai_lab.project.files import merged

_MOST_MARGIN = 0.5
_COLUMNS = 100  # of the line that says so
_WORDS = 40  # characters of a setting in it
_QUIET_S = 2.0  # an answer that takes longer says what it tries
_EXAMPLE = 32  # sequences of a step, where nothing is said


@dataclass(frozen=True)
class Question:
    """`config`: the run as it is without a plan. `fixed`: settings (nested) that are no choice.
    `packages`: with attention kernels, as in `will_fit`."""

    config: TrainConfig
    tokens: int
    room: Room
    numerics: Numerics
    fixed: dict[str, Any]
    packages: str | None = None
    remarks: list[str] = field(default_factory=list)

    def answer(self, on_next: OnNext = lambda words, left: None) -> Plan:
        """The plan. `on_next` is told each setting before it is predicted, and about how many are
        left after it."""
        with sizes_that_exist(self.config):
            return make_plan(
                self.config,
                self.tokens,
                self.room,
                allowed=self.numerics,
                fixed=self.fixed,
                packages=self.packages,
                on_next=on_next,
            )


def ask(
    source: Source,
    fixed: dict[str, Any],
    *,
    tokens: int | None = None,
    seq_len: int | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    budget: float | None = None,
    numerics: str = "harmless",
    margin: float = MARGIN,
    packages: str | None = None,
    passport: Path | None = None,
) -> Question:
    """The question for the run of `source`, with the settings `fixed` and sequences of `seq_len`.
    `passport`: whose rates times are made of. UserError for what cannot be asked."""
    fixed = merged(fixed, {} if seq_len is None else {"seq_len": seq_len})
    if numerics not in (known := get_args(Numerics)):
        raise UserError(f"numerics is one of {', '.join(known)}{hint(str(numerics), known)}")
    if not 0 <= margin <= _MOST_MARGIN:
        raise UserError(f"the margin is a share from 0 to {_MOST_MARGIN:g}, not {margin:g}")
    if budget is not None and not 0 < budget < float("inf"):
        raise UserError(f"a budget is so many GiB, not {budget:g}")
    target = _target(gpu, budget, passport)
    try:
        asked = source.run(target if gpu or passport else None, gpus, fixed)
    except AnotherModel as error:
        raise UserError(
            f"{error}; `lsai predict --hf` predicts a step of it, with settings that you choose"
        ) from None
    config = with_usual_vocabulary(asked.config)
    if tokens is None and source.study is None:
        some = _EXAMPLE * config.seq_len * config.parallel.readers
        raise UserError(f"say how many tokens an optimizer step has, for example --tokens {some}")
    tokens = tokens or config.tokens_per_step
    batches(config, tokens, fixed)
    return Question(
        config,
        tokens,
        Room(target, budget, margin),
        cast(Numerics, numerics),
        fixed,
        packages,
        [*asked.remarks, *not_there(config, [target])],
    )


@contextmanager
def shown_tries(file: TextIO, hidden: bool | None = None) -> Iterator[OnNext]:
    """Yields what is to be told each setting that is tried and how many are left; after two seconds
    `file` shows it, with the time left. `hidden`: None where `file` is no terminal."""
    with tqdm(
        bar_format="{n} of about {total} settings, {elapsed} so far, {remaining} left: {desc}",
        leave=False,
        delay=_QUIET_S,
        file=file,
        disable=hidden,
        ncols=_COLUMNS,
    ) as bar:

        def on_next(words: str, left: int) -> None:
            bar.total = bar.n + 1 + left
            short = textwrap.shorten(words, _WORDS, placeholder=" …")
            bar.set_description_str(short, refresh=False)
            bar.update()

        yield on_next


def _target(gpu: str | None, budget: float | None, passport: Path | None) -> Gpu:
    """The GPU of the plan: the one named, else this machine's, else any with the budget's memory.
    UserError where nothing says how much memory there is."""
    if passport is not None:
        if (target := gpu_called(gpu, passport)).is_cpu:
            raise UserError(f"{passport} is the passport of a CPU; plans are made for GPUs")
        return target
    if gpu is not None:
        return find_gpu(gpu)
    here = gpu_facts()["gpu"]
    if here is not None:
        return find_gpu(str(here))
    if budget is None:
        raise UserError("say how much memory there is: --gpu, for example h100, or --budget (GiB)")
    return gpu_with(budget)
