"""Checkpoints that resume to the last bit.

A checkpoint is `checkpoint-<step>.pt` with weights, optimizer states, random generators and the
step, which is also the data position (batches are a function of the step), and
`checkpoint-<step>.json` with its size and checksum. The small file is written last, by rename:
without it there is no checkpoint, so a kill during saving costs the new one and never an old one.
Older ones are removed after a newer one is safely on disk.
"""

import hashlib
import json
import pickle
import shutil
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol, cast

import torch
from torch import nn
from torch.optim import Optimizer

from lsai_core.base.errors import UserError
from lsai_core.base.files import atomic_writer, write_json
from lsai_core.optimizers.kept import kept, require_restored, require_same


class _HashingWriter:
    """A binary file that hashes what passes through it (torch.save only ever appends)."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.bytes = file, hashlib.blake2b(), 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of `step` completed steps into `folder`, then remove all but the newest
    `keep`."""
    path = folder / f"checkpoint-{step:08d}.pt"
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    random = {"torch": torch.get_rng_state(), "cuda": cuda}
    try:
        with atomic_writer(path) as file:
            writer = _HashingWriter(file)
            torch.save({"step": step, "random": random, **state}, cast(IO[bytes], writer))
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"the checkpoint of step {step} could not be saved: {beginning(error)}"
        ) from error
    facts = {"step": step, "bytes": writer.bytes, "blake2b": writer.digest.hexdigest()}
    write_json(path.with_suffix(".json"), facts)
    for old in checkpoints(folder)[:-keep]:
        old.with_suffix(".json").unlink()
        old.unlink()
    for part in _unfinished(folder):
        part.unlink()
    return path


def beginning(error: BaseException) -> BaseException:
    """The error that led to this one: of a full disk torch itself says that a position is
    unexpected."""
    return beginning(error.__context__) if error.__context__ else error


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first."""
    return sorted(path.with_suffix(".pt") for path in folder.glob("checkpoint-????????.json"))


def remove_all(folder: Path) -> None:
    """Delete the checkpoints of a finished run, whole or sharded: its results no longer need
    them."""
    for path in [
        *folder.glob("checkpoint-*.json"),
        *folder.glob("checkpoint-*.pt"),
        *_unfinished(folder),
    ]:
        path.unlink()
    for path in folder.glob("sharded-????????"):
        shutil.rmtree(path)


def _unfinished(folder: Path) -> list[Path]:
    """What a kill during saving left behind (one process at a time writes to a run's folder)."""
    return list(folder.glob(".checkpoint-*.part"))


def checksum(path: Path) -> str:
    """BLAKE2b of a file's content, in hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def load(path: Path) -> dict[str, Any]:
    """Read one checkpoint into host memory after checking its size and checksum.

    Raises UserError if the file is missing, damaged or of another version.
    """
    advice = (
        f"delete {path.with_suffix('').name}.* to resume from the one before it, or to start again"
    )
    try:
        facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if (path.stat().st_size, checksum(path)) != (facts["bytes"], facts["blake2b"]):
            raise UserError(f"{path} is damaged: size or checksum do not match; {advice}")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        raise UserError(
            f"{path} cannot be read ({' '.join(str(error).split())[:200]}); {advice}"
        ) from None


def progress(facts: Any, path: Path) -> tuple[int, float]:
    """Completed steps and seconds trained, as the checkpoint at `path` says of itself.

    Raises ValueError for values that are none, or where its name says another step.
    """
    step, train_s, named = facts["step"], facts["train_s"], path.stem.rpartition("-")[2]
    if type(step) is not int or step != int(named):
        raise ValueError(f"step is {str(step)[:60]!r}, and the name says {named}")
    if type(train_s) not in (int, float) or not 0 <= train_s < float("inf"):
        raise ValueError(f"train_s is {str(train_s)[:60]!r}")
    return step, float(train_s)


class Checkpoints(Protocol):
    """What the training loop asks of a run's checkpoints (`WholeCheckpoints`,
    `parallel.checkpoint.ShardedCheckpoints`)."""

    def restore(self, model: nn.Module, optimizer: Optimizer) -> tuple[int, float]:
        """Load the newest; (steps done, seconds trained), (0, 0.0) where there is none. UserError
        if it cannot be used."""

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, train_s: float) -> None:
        """Save after `step` completed steps, possibly behind the caller's back."""

    def check(self) -> None:
        """Raise what went wrong with an earlier save, if it is known by now; never waits."""
        return None

    def finish(self) -> None:
        """Return when everything saved is on disk; raise what went wrong with it."""
        return None


class WholeCheckpoints(Checkpoints):
    """The checkpoints of a run of one process: one file each, complete when `save` returns, so that
    nothing is waited for."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def restore(self, model: nn.Module, optimizer: Optimizer) -> tuple[int, float]:
        saved = checkpoints(self.folder)
        if not saved:
            return 0, 0.0
        state = load(saved[-1])
        try:
            done = progress(state, saved[-1])
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            require_restored(optimizer, state["optimizer"])
            require_same(state.get("kept"), kept(optimizer))
            torch.set_rng_state(state["random"]["torch"])
            if state["random"]["cuda"] and torch.cuda.is_available():
                torch.cuda.set_rng_state_all(state["random"]["cuda"])
            return done
        except (KeyError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{saved[-1]} does not fit this run's model: {reason}") from None

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, train_s: float) -> None:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "kept": kept(optimizer),
            "train_s": train_s,
        }
        save(self.folder, step, state, self.keep)
