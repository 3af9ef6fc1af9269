"""Settings of records in today's words: what an older one would have had to say, and what is gone.

A default says what a run gets that is planned today. A record without a setting was made before the
setting was there, the way that `BEFORE` says, and else as the default does. A record with a setting
that is gone says nothing by it where it did nothing, and else cannot be run again.
"""

from typing import Any

from lsai_core.base.errors import UserError
from lsai_core.config.strict import Strict, deep_merge, validated
from lsai_lab.runs.kinds import get_kind
from lsai_lab.runs.records import Run

BEFORE: dict[str, Any] = {"loss": "full", "blocks": "plain", "optim": {"kernel": "torch"}}
# The update beside the next forward pass, 0: none. It made steps slower.
GONE = "overlap"  # of optim
LAST = "86f08e08"  # the last commit that has it


def with_older(training: dict[str, Any]) -> dict[str, Any]:
    """The recorded settings of a training run, with those that it is too old to have. UserError if
    it has one that is gone."""
    return deep_merge(BEFORE, _without_gone(training))


def without_gone(config: dict[str, Any]) -> dict[str, Any]:
    """Recorded settings as if there had never been those that are gone."""
    kept = {key: value for key, value in config.get("optim", {}).items() if key != GONE}
    return config | {"optim": kept}


def config_in_todays_words(run: Run) -> Strict:
    """The config of a run with all of today's settings. UserError if they cannot say it."""
    kind, config = run.summary.kind, run.config
    config = with_older(config) if kind == "train" else _without_gone(config)
    where = str(run.folder / "config.json")
    return validated(get_kind(kind).config_class(), config, where)


def _without_gone(config: dict[str, Any]) -> dict[str, Any]:
    """The same settings, if what is gone did nothing."""
    asked = config.get("optim", {}).get(GONE)
    if asked:
        raise UserError(f"optim.{GONE}={asked} cannot be run any more; commit {LAST} has it")
    return config if asked is None else without_gone(config)
