"""The kinds of run: what can be measured. Adding one is an entry here, a function that does the
work and a notebook that shows it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsai_core.base.code import version_of
from lsai_core.base.errors import Unavailable, UserError, hint
from lsai_core.config.strict import Strict
from lsai_core.parallel.world import World


@dataclass
class Context:
    """What a kind's function may use: its own folder, where data and other records lie, and a way
    to show progress.

    `world`: the processes that execute this run together; of one, until a kind launches more
    (`parallel.launch`).
    """

    folder: Path
    data_root: Path
    runs_root: Path
    on_rows: Callable[[list[dict[str, Any]]], None] = lambda rows: None
    world: World = field(default_factory=World)


@dataclass(frozen=True)
class Kind:
    """`module` holds the function `run`; `config` is `module:name`, of a module without torch:
    planning runs takes no time. `without`: names of files that are no part of the
    run key although the code reaches them.

    `timed`: False if what it finds is no time or speed (a largest size), so that on a CPU two such
    runs can share the machine. `over_nodes`: True if its processes may be spread over the nodes of
    a cluster job; else one node has to hold them all.
    """

    module: str
    config: str
    notebook: str
    without: tuple[str, ...] = ()
    uses_data: bool = False
    timed: bool = True
    over_nodes: bool = False

    def config_class(self) -> type[Strict]:
        module, _, name = self.config.partition(":")
        return getattr(importlib.import_module(module), name)

    @property
    def code(self) -> str:
        """A hash over the files that can change a result: what the kind's own code reaches."""
        config = self.config.partition(":")[0]
        return version_of(self.module, config, within=_DECIDES, without=self.without)

    def unavailable(self, config: Strict) -> str | None:
        """Why this machine cannot execute such a run, as far as its module can say before
        (`require`); None if it can."""
        try:
            getattr(importlib.import_module(self.module), "require", lambda _: None)(config)
        except Unavailable as error:
            return str(error)
        return None

    def function(self) -> Callable[[Any, Context], dict[str, Any]]:
        return importlib.import_module(self.module).run


KINDS: dict[str, Kind] = {
    "train": Kind(
        "lsai_lab.benches.training",
        "lsai_core.config.train:TrainConfig",
        "run-training.ipynb",
        uses_data=True,
        over_nodes=True,
    ),
    "batch_search": Kind(
        "lsai_lab.searches.batch_search",
        "lsai_lab.searches.config:BatchSearchConfig",
        "run-batch-search.ipynb",
        timed=False,
    ),
    "model_search": Kind(
        "lsai_lab.searches.model_search",
        "lsai_lab.searches.config:ModelSearchConfig",
        "run-model-search.ipynb",
        timed=False,
    ),
    "ceilings": Kind(
        "lsai_lab.benches.machine", "lsai_lab.benches.config:CeilingsConfig", "run-machine.ipynb"
    ),
    "gemm": Kind("lsai_lab.benches.gemm", "lsai_lab.benches.config:GemmConfig", "run-gemm.ipynb"),
    # The measured table is made from these runs and changes none of their times.
    "attention": Kind(
        "lsai_lab.benches.attention.bench",
        "lsai_lab.benches.attention.config:AttentionBenchConfig",
        "run-attention.ipynb",
        without=("measured.json",),
    ),
    "context": Kind(
        "lsai_lab.benches.context.bench",
        "lsai_lab.benches.context.config:ContextBenchConfig",
        "run-context.ipynb",
        over_nodes=True,
    ),
    "collectives": Kind(
        "lsai_lab.benches.collectives",
        "lsai_lab.benches.config:CollectivesConfig",
        "run-collectives.ipynb",
        over_nodes=True,
    ),
    "peer": Kind(
        "lsai_lab.peers.run", "lsai_lab.peers.config:PeerConfig", "run-peer.ipynb", uses_data=True
    ),
}

# How runs are planned, started, watched and written down changes no result: only this code can.
_DECIDES = ("lsai_core", "lsai_lab.benches", "lsai_lab.searches", "lsai_lab.peers")


def processes(config: Strict) -> int:
    """How many processes, one a GPU, a run of this config starts; a search's are those of each
    try."""
    settings = vars(config)
    parallel = vars(settings.get("train", config)).get("parallel")
    return parallel.world_size if parallel else int(settings.get("processes", 1))


def device_of(config: Strict) -> str:
    """`auto`, `cpu` or `cuda`: where a run of this config computes."""
    settings = vars(vars(config).get("train", config))
    return str(settings.get("device", "auto"))


def get_kind(name: str) -> Kind:
    """The kind called `name`; UserError lists the known ones."""
    if name not in KINDS:
        raise UserError(f"unknown kind of run {name!r}{hint(name, KINDS)}")
    return KINDS[name]
