"""Distributed checkpoints: every process writes its own slices, any number of processes reads them.

A checkpoint is a folder `sharded-<step>` in the format of torch.distributed.checkpoint (DCP), which
records for each tensor which part of it lies where; a reading process asks for what it needs.
`complete.json` in it is written last, by rank 0, when all slices are on disk: without it there is
no checkpoint, so a kill in mid-save costs the new one and never an old one.

Training waits until the slices are copied to host memory, not until they are written. There is no
random state to save.

DCP's metadata and small values are pickles, which run what they name. So nothing is read before the
checksums in `complete.json` hold, and no pickle that names anything but what DCP itself writes.
"""

import itertools
import json
import pickle
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dicts
from torch.optim import Optimizer

from lsai_core.base.errors import UserError
from lsai_core.base.files import write_json
from lsai_core.config.parallel import MOST_PROCESSES
from lsai_core.model.hf import save_hf
from lsai_core.model.transformer import Transformer
from lsai_core.optimizers.base import held_here
from lsai_core.optimizers.kept import kept, require_same
from lsai_core.parallel.rows import out_of_order
from lsai_core.parallel.world import World
from lsai_core.training.checkpoint import beginning, checksum, progress
from lsai_core.training.saved_rows import RowsInOrder

COMPLETE = "complete.json"
_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_WRITTEN = {
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in _CLASSES),
    *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
}


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _WRITTEN:
            raise pickle.UnpicklingError(f"names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class _Values(RowsInOrder):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def sharded_checkpoints(folder: Path) -> list[Path]:
    """Complete sharded checkpoints in a run's folder, oldest first."""
    return sorted(path.parent for path in folder.glob(f"sharded-????????/{COMPLETE}"))


class ShardedCheckpoints:
    """The checkpoints of one run; every process makes one and calls the same methods at the same
    steps.

    `sequences`: what one optimizer step trains on, over all processes. A checkpoint is refused for
    another number, since the next step would see other data. `tp`: processes that share each
    matrix.
    """

    def __init__(self, folder: Path, keep: int, sequences: int, world: World, tp: int = 1) -> None:
        self.folder, self.keep, self.sequences, self.world = folder, keep, sequences, world
        self.tp = tp
        self._alone = not world.launched
        # Saving runs in a thread beside training and needs its own order of calls.
        self._group = None if self._alone else dist.new_group(backend="gloo")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def restore(self, model: nn.Module, optimizer: Optimizer) -> tuple[int, float]:
        """Load the newest complete checkpoint; (steps done, seconds trained), (0, 0.0) where there
        is none.

        Raises UserError for one that is damaged or does not fit.
        """
        if self.world.is_main:
            for unfinished in set(self.folder.glob("sharded-????????")) - set(
                sharded_checkpoints(self.folder)
            ):
                shutil.rmtree(unfinished)
        self.world.barrier()
        saved = sharded_checkpoints(self.folder)
        if not saved:
            return 0, 0.0
        facts = self._facts(saved[-1])
        state = self._state(model, optimizer)
        try:
            with (saved[-1] / ".metadata").open("rb") as file:
                _Metadata(file).load()
            with warnings.catch_warnings():  # DCP finds it remarkable that a process is alone
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                where: dict[str, Any] = {"process_group": self._group, "no_dist": self._alone}
                planner = _Values(getattr(model, "config", None), facts.get("tp", 1), self.tp)
                dcp.load(state, checkpoint_id=saved[-1], planner=planner, **where)
            held = held_here(optimizer)
            groups = state["optimizer"]["param_groups"]
            for group, own in zip(groups, held.param_groups, strict=True):
                if not own["params"]:  # torch looks for a group's parameters by its names
                    group["params"] = []
            dicts.set_state_dict(
                model,
                held,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            require_same(facts.get("kept"), self._kept(optimizer))
        # whatever a foreign file makes of its reader
        except (dcp.api.CheckpointException, Exception) as error:
            raise UserError(
                f"{saved[-1]} does not fit this run's model: {_reason(error)}"
            ) from error
        return progress(facts, saved[-1])

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, train_s: float) -> None:
        """Begin to write the checkpoint of `step` completed steps; waits for the one before to be
        on disk."""
        self.finish()
        path = self.folder / f"sharded-{step:08d}"
        written = dcp.async_save(
            self._state(model, optimizer),
            checkpoint_id=path,
            process_group=self._group,
            no_dist=self._alone,
        )
        facts = {
            "step": step,
            "ranks": self.world.size,
            "tp": self.tp,  # the order of rows in its matrices
            "sequences_per_step": self.sequences,
            "train_s": train_s,
            "kept": self._kept(optimizer),
        }
        self._running = self._writer.submit(self._complete, written, path, facts)

    def _state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Weights and states of this process, by the names of the whole model's parameters.

        Groups name the parameters of all processes, as each writes them and asks for them.
        """
        weights, states = dicts.get_state_dict(model, held_here(optimizer))
        groups: list[dict[str, Any]] = states["param_groups"]  # type: ignore[assignment]
        everyone = self.world.gather([group["params"] for group in groups])
        for group, *others in zip(groups, *everyone, strict=True):
            group["params"] = list(dict.fromkeys(itertools.chain(*others)))
        return {"model": weights, "optimizer": states}

    def _kept(self, optimizer: Optimizer) -> dict[str, int]:
        """What the optimizer of all processes holds on to."""
        own, pipeline = kept(held_here(optimizer)), getattr(optimizer, "pipeline_group", None)
        if held_here(optimizer) is optimizer and pipeline is None:
            return own  # each process counts whole tensors, of all
        everyone = self.world.gather(own)
        if pipeline is not None:  # whole tensors again, of its stages
            everyone = [everyone[rank] for rank in dist.get_process_group_ranks(pipeline)]
        return {name: sum(each[name] for each in everyone) for name in own}

    def check(self) -> None:
        """Raise what went wrong with the last save (a full disk, say), if it is known by now."""
        if self._running is not None and self._running.done():
            self.finish()

    def finish(self) -> None:
        """Wait until what was saved is on disk, or raise what went wrong with it."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _complete(self, written: Any, path: Path, facts: dict[str, Any]) -> None:
        try:
            written.result()  # or the error of any process
        except dcp.api.CheckpointException as error:
            if self.world.is_main:  # makes room again, which may be what was missing
                shutil.rmtree(path, ignore_errors=True)
            raise OSError(
                f"the checkpoint of step {facts['step']} could not be saved: {_reason(error)}"
            ) from error
        sums = {file.name: checksum(file) for file in path.glob(f"__{self.world.rank}_*")}
        everyone = [sums] * self.world.size
        if not self._alone:
            dist.all_gather_object(everyone, sums, group=self._group)
        if not self.world.is_main:
            return
        files = {name: digest for one in everyone for name, digest in one.items()}
        write_json(
            path / COMPLETE, {**facts, "files": files | {".metadata": checksum(path / ".metadata")}}
        )
        for old in sharded_checkpoints(self.folder)[: -self.keep]:
            (old / COMPLETE).unlink()
            shutil.rmtree(old)

    def _facts(self, path: Path) -> dict[str, Any]:
        advice = (
            f"delete the folder {path.name} to resume from the one before it, or to start again"
        )
        try:
            facts = _complete_facts(path)
            share = sorted(facts["files"].items())[self.world.rank :: self.world.size]
            error = next((name for name, digest in share if checksum(path / name) != digest), None)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as unreadable:
            facts, error = {}, " ".join(f"{type(unreadable).__name__}: {unreadable}".split())[:200]
        for wrong in filter(None, self.world.gather(error)):
            raise UserError(f"{path} is damaged ({wrong}); {advice}")
        if facts["sequences_per_step"] != self.sequences:
            raise UserError(
                f"{path} was written at {facts['sequences_per_step']} sequences per step, this run "
                f"has {self.sequences}; "
                "choose batch_size so that batch_size x grad_accum x processes stays the same"
            )
        return facts


def _complete_facts(path: Path) -> dict[str, Any]:
    """What `complete.json` of the checkpoint `path` says: of all its slices, and of steps that can
    be.

    Raises ValueError, KeyError or TypeError where it does not.
    """
    facts = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
    progress(facts, path)
    sequences, tp = facts["sequences_per_step"], facts.get("tp", 1)
    if type(tp) is not int or not 1 <= tp <= MOST_PROCESSES:
        raise ValueError(f"tp is {str(tp)[:60]!r}")
    if type(sequences) is not int or sequences < 1:
        raise ValueError(f"sequences_per_step is {str(sequences)[:60]!r}")
    named = set(facts["files"])
    slices = {".metadata", *(file.name for file in path.glob("__*"))}
    if wrong := sorted(slices - named) or [name for name in named if Path(name).name != name]:
        raise ValueError(f"{COMPLETE} has no checksum of {wrong[0][:60]!r}, or it is no slice")
    return dict(facts)


def _reason(error: BaseException) -> str:
    """One line: of what several processes met, the first one's own words."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        cause = next(iter(error.failures.values()))[0]
        error = beginning(cause) if isinstance(cause, BaseException) else error
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def export_hf(model: Transformer, folder: Path, world: World, *, max_seq_len: int = 2048) -> None:
    """Write `model`, sharded or not, to `folder` (see `save_hf`), gathered tensor by tensor into
    rank 0's host memory; every process must call."""
    options = dicts.StateDictOptions(full_state_dict=True, cpu_offload=model.pipeline is None)
    whole: dict[str, Any] = dicts.get_model_state_dict(model, options=options)
    if model.pipeline is not None:  # each process has other parameters
        own = {name: value.cpu() for name, value in whole.items()}
        whole = {name: value for part in world.gather(own) for name, value in part.items()}
    if world.is_main:
        with torch.device("meta"):
            plain = Transformer(model.config, model.attention_config)
        # Without what only training needs (the scales of fp8).
        plain.load_state_dict(
            {name: out_of_order(whole[name], model.row_order(name)) for name in plain.state_dict()},
            assign=True,
        )
        save_hf(plain, folder, max_seq_len=max_seq_len)
    world.barrier()
