"""Other projects' programs that predict a training step's memory, run on what was measured here.

    python tests/rivals.py MemTracker          torch.distributed._tools.mem_tracker of this PyTorch
    python tests/rivals.py SimuMax CHECKOUT    github.com/MooreThreads/SimuMax, its requirements
    python tests/rivals.py Primus CHECKOUT     github.com/AMD-AGI/Primus, its requirements

Each writes its own rows of `reports/recorded/predictions/rivals.csv`; none needs a GPU.
`params/rivals.yaml` says which version ran, what its numbers mean and what it has no words for:
such runs are left out (`cannot`), not approximated.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))

from lsai_core.config.train import TrainConfig
from lsai_lab.predictions.recorded import (
    OURS,
    config_of,
    kernel_of,
    predicted_runs,
    run_name,
    table_path,
)
from lsai_lab.predictions.rivals import ROWS, published_name, published_sample
from lsai_lab.project.files import load_yaml, repo_root
from lsai_lab.runs.records import recorded_runs

MOST_LAYERS = 64  # MemTracker walks over all modules at each operator: longer runs take it minutes
MIXED = ("nanotron", "megatron")  # trainers that keep fp32 masters beside bf16 weights


class Asked(NamedTuple):
    """A run that was measured.

    `trainer`: whose it is. `kernel`: of attention. `masters`: processes that share the states of
    the optimizer alone (ZeRO-1).
    """

    sample: str
    run: str
    config: TrainConfig
    trainer: str = OURS
    kernel: str | None = None
    masters: int = 1


class Said(NamedTuple):
    """What a program says of it: GiB of tensors, of reserved memory where it has such a number, or
    why it failed."""

    gib: float | None
    reserved: float | None = None
    failed: str | None = None


class Rival(NamedTuple):
    """`ask` answers for a run; `cannot` is why it has no words for it, or None."""

    ask: Callable[[Asked], Said]
    cannot: Callable[[Asked], str | None]
    programs: Callable[[str], dict[str, Any]] | None = None  # of `tests/anybody.py`, as a dict


def measured_runs(root: Path) -> list[Asked]:
    """Recorded runs on GPUs with a peak of memory, and published figures."""
    runs = {str(run.folder): run for run in recorded_runs(root / "reports")}
    rows = predicted_runs([*runs.values()], root / "reports")
    found = []
    for folder in rows.dropna(subset=["error", "predicted_reserved"])["run"]:
        run, config = runs[folder], config_of(runs[folder], with_gone=False)
        kernel = kernel_of(run, config)
        found.append(Asked("recorded", run_name(run), config, kernel=kernel))
    trainers = load_yaml(root / "params" / "published.yaml")["figures"]
    for row in pd.read_csv(table_path(root, "published")).itertuples():
        config = TrainConfig.model_validate_json(row.config)
        name = published_name(row.source, row.row)
        trainer = trainers[row.source]["as"]
        sample = published_sample(trainer)
        found.append(Asked(sample, name, config, trainer, masters=row.masters))
    return found


def megatron_cannot(asked: Asked) -> str | None:
    """Why a simulator of Megatron-LM has no words for a run: Adam with fp32 masters and moments
    beside bf16 weights, whole logits, blocks that are kept or computed again as a whole."""
    config, parallel = asked.config, asked.config.parallel
    shared = parallel.tp * parallel.pp > 1
    whole = config.loss == "full" or shared
    mixed = config.precision in ("bf16_autocast", "bf16_residual") or asked.trainer in MIXED
    reasons = {
        "weights, gradients or states are not those of mixed precision": not mixed,
        "8-bit states": config.optim.states != "full",
        "shards of FSDP, or slices of a sequence": parallel.sharded or parallel.cp > 1,
        "several processes of this package": parallel.distributed and asked.trainer == OURS,
        "the loss keeps no logits": not whole,
        "products in fp8": config.fp8.recipe != "none",
        "a window of attention": config.attention.window is not None,
        "compiled blocks": config.compile,
        "checkpointing of parts of a block": config.grad_checkpoint not in ("none", "full"),
        "tied embeddings": config.model.tie_embeddings,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def eager_cannot(asked: Asked) -> str | None:
    """Why MemTracker cannot follow a run: it sees eager operators of one process."""
    config = asked.config
    reasons = {
        "another trainer's": asked.trainer != OURS,
        "several processes or offload": config.parallel.distributed,
        "compiled blocks": config.compile,
        "inputs in host memory": config.saved_inputs == "host",
        f"more than {MOST_LAYERS} layers": config.model.n_layers > MOST_LAYERS,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def rival_of(name: str, checkout: Path | None) -> Rival:
    """What runs the program; imports it."""
    if name == "MemTracker":
        from rival_memtracker import of_program, of_run

        return Rival(of_run, eager_cannot, of_program)
    assert checkout is not None, "where is its checkout?"
    if name == "SimuMax":
        from rival_simulators import simumax

        return Rival(simumax(checkout), megatron_cannot)
    from rival_simulators import primus

    return Rival(primus(checkout), megatron_cannot)


def answers(name: str, rival: Rival, root: Path) -> pd.DataFrame:
    """Its rows of the table. Runs of one config are asked once."""
    rows, known, left_out = [], dict[str, Said](), Counter[str]()
    for asked in measured_runs(root):
        if reason := rival.cannot(asked):
            left_out[f"{asked.sample}: {reason}"] += 1
            continue
        question = f"{asked.config.model_dump_json(exclude={'seed'})} {asked[3:]}"
        if question not in known:
            known[question] = rival.ask(asked)
            print(asked.run, known[question], flush=True)
        rows.append((name, asked.sample, asked.run, *known[question]))
    if rival.programs is not None:
        import anybody

        anybody.import_once()
        found = anybody.each(rival.programs, list(anybody.CONFIGURATIONS), 1, "fork")
        rows += [(name, "programs", run, *said.values()) for run, said in found.items()]
    for reason, count in left_out.most_common():
        print(f"{count:4d} left out, {reason}")
    return pd.DataFrame(rows, columns=ROWS).round({"gib": 4, "reserved": 4})


def main() -> None:
    """The command line."""
    name, root = sys.argv[1], repo_root()
    rival = rival_of(name, Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    path = table_path(root, "rivals")
    new = answers(name, rival, root)
    if path.exists():
        kept = pd.read_csv(path)
        new = pd.concat([kept[kept["rival"] != name], new], ignore_index=True)
    new.to_csv(path, index=False)


if __name__ == "__main__":
    main()
