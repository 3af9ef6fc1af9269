"""`lab.plan`: the fastest setting that fits, as `lsai plan` finds it."""

import os
import sys
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from lsai_core.base.errors import UserError
from lsai_core.base.shown import Shown
from lsai_core.base.tables import Part
from lsai_core.config.train import TrainConfig
from lsai_core.profiling.gpus import MARGIN
from lsai_lab.interactive.asked import gpu_words, require_numbers, said_in_python, source_of
from lsai_lab.interactive.planning import as_nested
from lsai_lab.predictions.asked import Source
from lsai_lab.predictions.plan import Plan
from lsai_lab.predictions.plan_asked import ask, shown_tries
from lsai_lab.predictions.plan_told import told
from lsai_lab.project.files import PAGE_FOLDER
from lsai_lab.runs.frames import Frame


class Planned(Shown):
    """A plan: `answer` in words, `config` (None: nothing fits), `reasons` for each choice, and
    `settings`, the chosen one and the next best with `reserved_gib`, `host_gib` (both of one GPU)
    and `tokens_per_s`; `remarks`:
    what one may not have asked for."""

    def __init__(self, plan: Plan, remarks: Sequence[str]) -> None:
        found = told(plan)
        self.remarks = list(remarks)
        step = f"{found['tokens_per_step']:,} tokens a step"
        self._asked = f"{step}, in sequences of {found['seq_len']:,}"
        self.answer: str = found["answer"]
        self.config: TrainConfig | None = plan.chosen.config if plan.chosen else None
        self.reasons = Frame(found["reasons"])
        rows = [found["plan"] | {"why": "chosen"}, *found["next"]] if found["plan"] else []
        columns = ["words", "reserved_gib", "host_gib", "tokens_per_s", "why"]
        self.settings = Frame(rows, columns=columns)

    @property
    def fits(self) -> bool:
        """Whether anything fits."""
        return self.config is not None

    def _parts(self) -> list[Part]:
        """The answer with its reasons, and the settings."""
        because = self.reasons[["chosen", "reason"]].values.tolist() if len(self.reasons) else []
        note = "\n".join([self._asked, *self.remarks])
        heads = ("setting", "GiB", "host GiB", "tokens/s", "why")
        rows = self.settings.values.tolist()[1:]
        if not self.settings["host_gib"].any():
            heads, rows = _without_host(heads), [*map(_without_host, rows)]
        return [
            Part(self.answer, ("choice", "why"), because, note=note),
            Part("The next best", heads, rows),
        ]


def _without_host(row: Sequence[Any]) -> tuple[Any, ...]:
    return (*row[:2], *row[3:])


def plan(
    what: str | None = None,
    gpu: str | float | None = None,
    *,
    tokens: int | None = None,
    seq_len: int | None = None,
    budget: float | None = None,
    gpus: int | None = None,
    study: str | None = None,
    variant: str | None = None,
    hf: str | Path | None = None,
    numerics: str = "harmless",
    margin: float = MARGIN,
    overrides: Mapping[str, Any] | None = None,
    passport: str | Path | None = None,
    profile: str | None = None,
) -> Planned:
    """The fastest setting whose predicted step fits a GPU or a budget, computed without a GPU.

    `what`: a preset (`"llama3-8b"`), `"study.variant"`, or the folder of a Hugging Face config; or
    name a `study` and `variant`, or that folder with `hf`. `tokens` of an optimizer step, such as
    131072, in sequences of `seq_len`; a study has its own. `gpu`: a name as in `lsai plan`, or its
    memory (24, in GiB); `budget`: GiB that a GPU's allocator may reserve; `gpus` share the model.
    `numerics`: fp32, harmless or fp8. `margin`: the share of the memory (of 10 GiB at
    least) that stays free.
    `overrides`: settings with dots that are no choice. `passport`: a file of `lsai probe`, whose
    rates times are made of. Raises UserError for what cannot be asked.

    >>> plan = lab.plan("lab-tiny", "24GiB", tokens=2048, seq_len=512)
    >>> plan.fits, plan.config.seq_len
    (True, 512)
    """
    whole = {"tokens": tokens, "seq_len": seq_len, "gpus": gpus}
    require_numbers(whole, Integral, "a whole number of at least 1")
    require_numbers({"budget": budget, "margin": margin or None}, Real, "a number above 0")
    named = {"study": study, "variant": variant, "hf": hf, "profile": profile}
    with said_in_python():
        words = gpu_words(gpu, what)
        source = source_of(what, named)
        if not isinstance(source, Source):
            said = what if isinstance(what, str) else f"a {type(what).__name__}"
            raise UserError(f"a plan is made for a preset, a study's variant or hf, not for {said}")
        question = ask(
            source,
            as_nested(overrides or {}),
            tokens=tokens,
            seq_len=seq_len,
            gpu=words,
            gpus=gpus,
            budget=budget,
            numerics=numerics,
            margin=margin,
            passport=None if passport is None else Path(passport),
        )
        with shown_tries(sys.stdout, hidden=PAGE_FOLDER in os.environ) as on_next:
            return Planned(question.answer(on_next), question.remarks)
