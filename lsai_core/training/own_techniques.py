"""The files of a laboratory (`techniques/`) that a run names, and the hash of what they do: part of
the run's key, and of the question that a prediction answers."""

from pydantic import BaseModel

from lsai_core.base.code import own_hash
from lsai_core.base.plugins import own
from lsai_core.training.combinations import training_configs


def own_techniques(config: BaseModel) -> dict[str, str]:
    """Each file that a training run in `config` names (`optimizers/mine`), with its hash; empty if
    all is this package's."""
    found: dict[str, str] = {}
    for train in training_configs(config):
        named = {
            "attention": train.attention.backend,
            "optimizers": train.optim.name,
            "losses": train.loss,
        }
        for kind, name in named.items():
            if (path := own(kind).get(name)) is not None:
                found[f"{kind}/{name}"] = own_hash(path)
    return found
