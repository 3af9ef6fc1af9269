"""Checkpoints that resume to the last bit.

A checkpoint is `checkpoint-<step>.pt` with weights, optimizer states, random generators and the step, which is also the
data position (batches are a function of the step), and `checkpoint-<step>.json` with its size and checksum. The small file
is written last, by rename: without it there is no checkpoint, so a kill during saving costs the new one and never an old
one. Older ones are removed after a newer one is safely on disk.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from lsai_core.errors import UserError
from lsai_core.files import atomic_writer, write_json

_CHUNK = 1 << 24


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
    """Write the checkpoint of `step` completed steps into `folder`, then remove all but the newest `keep`."""
    path = folder / f"checkpoint-{step:08d}.pt"
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    with atomic_writer(path) as file:
        writer = _HashingWriter(file)
        torch.save(
            {"step": step, "random": {"torch": torch.get_rng_state(), "cuda": cuda}, **state}, cast(IO[bytes], writer)
        )
    facts = {"step": step, "bytes": writer.bytes, "blake2b": writer.digest.hexdigest()}
    write_json(path.with_suffix(".json"), facts)
    for old in checkpoints(folder)[:-keep]:
        old.with_suffix(".json").unlink()
        old.unlink()
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first."""
    return sorted(path.with_suffix(".pt") for path in folder.glob("checkpoint-????????.json"))


def remove_all(folder: Path) -> None:
    """Delete the checkpoints of a finished run: its results no longer need them."""
    for path in [*folder.glob("checkpoint-*.json"), *folder.glob("checkpoint-*.pt")]:
        path.unlink()


def load(path: Path) -> dict[str, Any]:
    """Read one checkpoint into host memory after checking its size and checksum.

    Raises UserError if the file is missing, damaged or of another version.
    """
    advice = f"delete {path.with_suffix('').name}.* to resume from the one before it, or to start again"
    try:
        facts = json.loads(path.with_suffix(".json").read_text())
        digest, size = hashlib.blake2b(), 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
        if (size, digest.hexdigest()) != (facts["bytes"], facts["blake2b"]):
            raise UserError(f"{path} is damaged: size or checksum do not match; {advice}")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())[:200]}); {advice}") from None


def restore_random_states(states: dict[str, Any]) -> None:
    """Put torch's generators back to where the checkpoint found them."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
