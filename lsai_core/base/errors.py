"""The exceptions that have a meaning of their own, first of all the one that users are meant to
see.

Everything a person can get wrong (a key in a YAML file, a missing file, a combination that cannot
work) is raised as `UserError` with one clear line that says what is wrong and what to do. The
command line prints that line and exits with 2; a notebook shows the line below the cell. Anything
else is a bug or a failed run and keeps its traceback.
"""

import difflib
import itertools
import linecache
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any


class BelowCell:
    """An exception that IPython shows below a cell in one line, after the line of a longer cell
    that raised it; %tb shows the whole traceback."""

    def _render_traceback_(self) -> list[str]:
        assert isinstance(self, BaseException)
        cells = [
            frame
            for frame in _frames(self)
            if frame.tb_frame.f_globals.get("__name__") == "__main__"
        ]
        if sys.exc_info()[1] is not self:  # it was shown before, and %tb asks for more
            began = cells[0] if cells else self.__traceback__
            return "".join(traceback.format_exception(type(self), self, began)).splitlines()
        return [*(_line_of(cells[-1]) if cells else []), f"error: {self}"]


def _frames(error: BaseException) -> Iterator[TracebackType]:
    frame = error.__traceback__
    while frame is not None:
        yield frame
        frame = frame.tb_next


def forget_frames(error: BaseException, inside: tuple[str, ...]) -> None:
    """Leave frames of files in the folders `inside` out of the error's traceback, unless there are
    no others."""
    kept = [
        frame
        for frame in _frames(error)
        if not frame.tb_frame.f_code.co_filename.startswith(inside)
    ]
    for frame, following in zip(kept, [*kept[1:], None], strict=bool(kept)):
        frame.tb_next = following
    if kept:
        error.__traceback__ = kept[0]


def _line_of(frame: TracebackType) -> list[str]:
    """`line 3: c = lab.load("memry")`; nothing of a cell of one line."""
    lines = linecache.getlines(frame.tb_frame.f_code.co_filename)
    number = frame.tb_lineno
    return [f"line {number}: {lines[number - 1].strip()}"] if 1 < len(lines) >= number else []


class UserError(BelowCell, Exception):
    """A mistake in the input: one line that says what is wrong and what to do about it."""


class UnknownName(BelowCell, AttributeError):
    """What is asked for behind a dot is not there; a notebook shows the line alone."""


class UnknownKey(BelowCell, KeyError):
    """A key that is not there, in one line; a notebook shows the line alone."""

    def __str__(self) -> str:
        return str(self.args[0])


class Known(dict[str, Any]):
    """A mapping by name, which says what comes near a name that is not there."""

    def __missing__(self, name: str) -> Any:
        raise UnknownKey(f"there is no {name!r}{hint(name, self)}")


class Unavailable(Exception):
    """This machine cannot run the request (no GPU, package missing, ...): recorded as
    `unavailable`, never as a failure."""


class Preempted(Exception):
    """The run was asked to stop (SIGTERM or SIGUSR1) and has saved a checkpoint."""


class Diverged(Exception):
    """The loss is no finite number, so that training cannot go on."""


_SHOWN, _MOST = 30, 3  # names of a line: where all are shown, and of those that come near


def nearest(name: object, known: Iterable[str]) -> list[str]:
    """Up to three known names that `name` may mean: those that differ in case or in what stands
    before a dot, and such as others call so; else those spelt alike, else those of the same
    letters, else those that have all its words. None, if no name comes near."""
    names, asked = list(dict.fromkeys(known)), _plain(name)
    found = [each for each in names if asked in (_plain(each), *_called(each))]
    if not found:
        lower = {each.lower(): each for each in reversed(names)}
        spelt = difflib.get_close_matches(str(name).lower(), lower, n=_MOST)
        found = [lower[each] for each in spelt]
    if not found:
        found = [each for each in names if sorted(each.lower()) == sorted(str(name).lower())]
    if not found and asked:
        words = {*asked.split("_")}
        found = [each for each in names if words <= {*_plain(each).split("_")}]
    return sorted(found, key=lambda each: each.count("."))[:_MOST]


def _plain(name: object) -> str:
    """The words of a name in small letters, an underscore in between."""
    return "_".join(re.findall(r"[^\W_]+", str(name).lower()))


def _called(name: str) -> list[str]:
    """What a known name is also called: its last part, and the words of others."""
    last = name.rpartition(".")[2]
    words = [OTHER_WORDS.get(each, "").split() for each in {name, last}]
    return [_plain(last), *itertools.chain(*words)]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The nearest of the known names, as a question; empty if none comes near."""
    near = nearest(name, known)
    return f"did you mean {' or '.join(near)}?" if near else ""


def hint(name: object, known: Iterable[str]) -> str:
    """What an error line says after an unknown name: up to three known ones that come near, else
    all of them; of more than thirty only how many there are."""
    names = list(dict.fromkeys(map(str, known)))
    if near := did_you_mean(name, names):
        return f"; {near}"
    if len(names) <= _SHOWN:
        return f"; known: {', '.join(names)}"
    alike = difflib.get_close_matches(str(name), names, n=_MOST, cutoff=0.0)
    return f"; of {len(names)} known ones the nearest are {', '.join(alike)}"


def no_column(name: object, columns: Iterable[str]) -> str:
    """The error line for a name that is no column, with the nearest of those that are."""
    return f"there is no column {name!r}{hint(name, columns)}"


def not_installed(error: ModuleNotFoundError) -> str | None:
    """What to do about a package of somebody else's that is not there; None if a file of ours is
    missing."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "lsai_core", "lsai_lab"):
        return None
    return (
        f"the package {package} is not installed here; pip install 'lsai[report]' brings all "
        f"of "
        f"the laboratory's"
    )


# What other programs and people call what has a name here. A setting whose last part alone says
# too little has its dots.
OTHER_WORDS = {
    # settings
    "seq_len": "block_size context context_length ctx length max_length max_seq_len n_ctx "
    "seq_length sequence_length",
    "batch_size": "batch bs mbs micro_batch micro_batch_size per_device_train_batch_size",
    "grad_accum": "accum accumulation gradient_accumulation gradient_accumulation_steps",
    "steps": "iterations iters max_steps num_steps n_steps train_steps",
    "lr": "learning_rate lrate step_size",
    "min_lr_ratio": "final_lr lr_min min_lr",
    "warmup_steps": "warmup warmup_iters",
    "grad_clip": "clip clip_grad clipping gradient_clipping max_grad_norm",
    "weight_decay": "decay wd",
    "betas": "beta beta1 beta2 momentum",
    "optim.name": "optim optimizer",
    "optim.rounding": "stochastic_rounding",
    "optim.states": "8bit optimizer_states",
    "n_layers": "depth layers n_layer num_hidden_layers num_layers",
    "d_model": "dim embed_dim hidden hidden_size n_embd width",
    "n_heads": "heads n_head num_attention_heads num_heads",
    "n_kv_heads": "kv_heads num_key_value_heads",
    "d_ff": "ffn ffn_dim ffn_size hidden_dim intermediate_size mlp_dim",
    "vocab_size": "n_vocab vocab vocabulary",
    "tie_embeddings": "tie_word_embeddings tied",
    "model.preset": "arch architecture model_name preset",
    "attention.backend": "attention_backend attn attn_implementation backend",
    "attention.window": "sliding_window window_size",
    "precision": "amp bf16 dtype fp16 mixed_precision torch_dtype",
    "grad_checkpoint": "activation_checkpointing checkpointing gradient_checkpointing recompute "
    "remat",
    "compile": "torch_compile",
    "data.source": "corpus data_path dataset text",
    "init_from": "from_pretrained initial_weights load_from pretrained",
    "parallel.fsdp": "data_parallel dp gpus n_gpus num_gpus world_size",
    "parallel.tp": "tensor_parallel tp_size",
    "parallel.pp": "pipeline_parallel pp_size",
    "parallel.cp": "context_parallel cp_size sequence_parallel",
    "eval.every": "eval_every eval_interval eval_steps",
    "checkpoint.every": "save_every save_interval save_steps",
    "checkpoint.export": "export save save_model",
    "profile.trace": "profiler trace",
    "profile.snapshot": "memory_snapshot snapshot",
    "seed": "random_seed rng",
    # results and columns
    "tokens_per_s": "speed throughput tok_s tokens_per_sec tokens_per_second tps",
    "step_ms": "iteration_time latency ms_per_step step_time step_time_ms time",
    "elapsed_s": "clock elapsed seconds time wall_clock wall_time",
    "wall_s": "duration runtime time wall_time",
    "train_loss": "loss training_loss",
    "validation_loss": "eval_loss test_loss val_loss valid_loss",
    "validation_perplexity": "perplexity ppl val_ppl",
    "mem_peak_allocated_gib": "max_memory mem memory memory_gib peak peak_gib peak_memory vram",
    "memory_allocated_gib": "mem memory memory_gib",
    "largest_batch": "max_batch max_batch_size",
    "mfu": "efficiency model_flops_utilization utilisation utilization",
    "gpu_power_w": "energy power watts",
    "gpu_clock_mhz": "clock frequency",
    "parameters": "n_params num_params num_parameters params size",
    "world_size": "gpus n_gpus num_gpus ranks",
    "gpu": "accelerator card device_name gpu_name",
    "outcome": "state status",
    "reason": "error exception failure",
    "run": "dir directory folder path",
    "key": "hash id run_id",
    "started": "date start time timestamp when",
    "machine": "host hostname node",
    "note": "comment description",
    # functions, and what an object has
    "open_run": "create_run new_run start start_run train",
    "find_run": "get_run",
    "load": "list_runs runs",
    "claims_table": "claims",
    "compare": "diff",
    "curves": "plot",
    "predict": "estimate fits memory will_fit",
    "execute": "go launch run start train",
    "folder": "dir directory path",
    "state": "status",
    "config": "hparams hyperparameters params settings",
    "results": "metrics summary",
    "plot": "draw show",
}
