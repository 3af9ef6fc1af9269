"""`lab.plan`: the fastest setting that fits, as `lsai plan` finds it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lsai_core.base.shown import Part, Shown
from lsai_core.config.train import TrainConfig
from lsai_core.profiling.gpus import MARGIN
from lsai_lab.interactive.planning import as_nested
from lsai_lab.predictions.asked import Source
from lsai_lab.predictions.plan import Plan
from lsai_lab.predictions.plan_asked import ask
from lsai_lab.predictions.plan_told import told


class Planned(Shown):
    """A plan: `answer` in words, `config` (None: nothing fits), `reasons` for each choice, and
    `settings`, the chosen one and the next best with `reserved_gib` and `tokens_per_s`."""

    def __init__(self, plan: Plan) -> None:
        found = told(plan)
        self.found = found
        self.answer: str = found["answer"]
        self.config: TrainConfig | None = plan.chosen.config if plan.chosen else None
        self.reasons = pd.DataFrame(found["reasons"])
        rows = [found["plan"] | {"why": "chosen"}, *found["next"]] if found["plan"] else []
        columns = ["words", "reserved_gib", "tokens_per_s", "why"]
        self.settings = pd.DataFrame(rows, columns=columns)

    @property
    def fits(self) -> bool:
        """Whether anything fits."""
        return self.config is not None

    def shown(self) -> list[Part]:
        """The answer with its reasons, and the settings."""
        because = [(row["chosen"], row["reason"]) for row in self.found["reasons"]]
        heads = ("setting", "GiB", "tokens/s", "why")
        return [
            Part(self.answer, ("choice", "why"), because),
            Part("The next best", heads, self.settings.values.tolist()[1:]),
        ]


def plan(
    what: str | None = None,
    gpu: str | None = None,
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

    `what`: a preset (`"llama3-8b"`); or name a `study` and `variant`, or the folder of a Hugging
    Face config with `hf`. `tokens` of an optimizer step in sequences of `seq_len`. `gpu`: a name as
    in `lsai plan`; `budget`: GiB that a GPU's allocator may reserve; `gpus` share the model.
    `numerics`: fp32, harmless or fp8. `margin`: the share of the memory that stays free.
    `overrides`: settings with dots that are no choice. `passport`: a file of `lsai probe`, whose
    rates times are made of. Raises UserError for what cannot be asked.
    """
    source = Source(study, variant, what, None if hf is None else Path(hf), profile=profile)
    question = ask(
        source,
        as_nested(overrides or {}),
        tokens=tokens,
        seq_len=seq_len,
        gpu=gpu,
        gpus=gpus,
        budget=budget,
        numerics=numerics,
        margin=margin,
        passport=None if passport is None else Path(passport),
    )
    return Planned(question.answer())
