"""Settings of records that are older than some of today's: what these would have had to say.

A default says what a run gets that is planned today. A record without a setting was made before the
setting was there, the way that `BEFORE` says, and else as the default does.
"""

from typing import Any

from lsai_core.base.files import deep_merge
from lsai_core.config.strict import Strict, validated
from lsai_lab.runs.kinds import get_kind
from lsai_lab.runs.records import Run

BEFORE: dict[str, Any] = {"loss": "full", "blocks": "plain", "optim": {"kernel": "torch"}}


def with_older(training: dict[str, Any]) -> dict[str, Any]:
    """The recorded settings of a training run, with those that it is too old to have."""
    return deep_merge(BEFORE, training)


def config_in_todays_words(run: Run) -> Strict:
    """The config of a run with all of today's settings. UserError if they cannot say it."""
    kind, config = run.summary.kind, run.config
    config = with_older(config) if kind == "train" else config
    where = str(run.folder / "config.json")
    return validated(get_kind(kind).config_class(), config, where)
