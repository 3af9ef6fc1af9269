"""A plan in words and as plain JSON: its first line, a reason for each choice, what comes next.

A reason compares a choice with the one that would have changed less or computed less: it does not
fit, by so many GiB, or is slower by a share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lsai_core.config.model import GradCheckpoint
from lsai_core.config.strict import changed_settings
from lsai_core.config.train import TrainConfig
from lsai_core.profiling.gpus import ALL_GPUS, GPUS, MARGIN, find_gpu, spare_gib
from lsai_lab.predictions.plan import KNOWN, TIE, Plan
from lsai_lab.predictions.plan_predicted import USUAL, Tried, gpu_with
from lsai_lab.predictions.plan_space import (
    CHECKPOINTS,
    batch_words,
    checkpoint_words,
    loss_words,
    states_words,
)

MARGIN_SOURCE = "predictions of reserved memory are that true (lsai_core.profiling.gpus.MARGIN)"
_ANY = 0.0005  # a share of a step's time that is shown


@dataclass(frozen=True)
class Reason:
    """Why `chosen`: `instead`, the other choice, lacks `missing_gib`, or is `slower` by a share."""

    choice: str
    chosen: str
    instead: str | None
    missing_gib: float | None
    slower: float | None
    reason: str


def told(plan: Plan) -> dict[str, Any]:
    """The whole plan as plain JSON: `answer` is its first line."""
    room, chosen = plan.room, plan.chosen
    gpu = room.gpu
    found: dict[str, Any] = {
        "answer": answer(plan),
        "found": chosen is not None,
        "gpu": gpu.name,
        "gpus": plan.asked.parallel.world_size,
        "memory_gib": gpu.memory_gib,
        "budget_gib": room.budget_gib,
        "margin": room.margin,
        "spare_gib": spare_gib(room.given_gib, room.margin),
        "margin_source": MARGIN_SOURCE if room.margin == MARGIN else "--margin",
        "usable_gib": room.usable_gib,
        "seq_len": plan.asked.seq_len,
        "tokens_per_step": tokens_per_step(plan),
        "numerics": plan.allowed,
        "plan": None if chosen is None else _setting(plan, chosen),
        "reasons": [] if chosen is None else [asdict(reason) for reason in reasons(plan, chosen)],
        "next": [] if chosen is None else [_loser(plan, chosen, other) for other in plan.others],
        "nearest": None if chosen is not None else _nearest(plan),
    }
    # after the reasons, which may have needed some
    return found | {"predictions": len(plan.search.tried)}


def tokens_per_step(plan: Plan) -> int:
    """Tokens of an optimizer step over all GPUs."""
    return plan.search.sequences * plan.asked.seq_len * plan.asked.parallel.readers


def answer(plan: Plan) -> str:
    """The first line, which can be acted on."""
    room, chosen = plan.room, plan.chosen
    if chosen is None:
        near = plan.nearest
        missing = near.reserved_gib - room.usable_gib
        return (
            f"Nothing fits: {near.words} takes least and lacks {gib(missing)}. It would fit "
            f"{_enough(plan)}."
        )
    on = f" on {USUAL.upper()}s" if USUAL.upper() in chosen.rates else ""
    several = " on each" if plan.asked.parallel.world_size > 1 else ""
    together = " in all" if plan.asked.parallel.world_size > 1 else ""
    words = f"{chosen.words[:1].upper()}{chosen.words[1:]}"
    host = f", {gib(chosen.host_gib)} of host memory{several}" if chosen.host_gib else ""
    return (
        f"{words}: {gib(chosen.reserved_gib)[:-4]} of {gib(room.given_gib)}{several}{host}, "
        f"about {rounded(chosen.tokens_per_s):,} tokens/s{together}{on}"
    )


def gib(size: float) -> str:
    """GiB with three significant digits and the unit."""
    return f"{size:.1f} GiB" if size >= 10 else f"{size:.2f} GiB"


def rounded(value: float) -> int:
    """To three significant digits, which is more than estimates are true to."""
    digits = max(0, len(str(int(value))) - 3)
    return int(round(value, -digits))


def _setting(plan: Plan, tried: Tried) -> dict[str, Any]:
    config = tried.config
    return {
        "words": tried.words,
        "micro_batch": config.batch_size,
        "accumulation": config.grad_accum,
        "activations": checkpoint_words(config),
        "states": states_words(config),
        "loss": loss_words(config),
        "reserved_gib": tried.reserved_gib,
        "peak_gib": tried.peak_gib,
        "host_gib": tried.host_gib,
        "step_s": tried.step_s,
        "tokens_per_s": tried.tokens_per_s,
        "rates": tried.rates,
        "attention": tried.attention,
        "settings": changed_settings(plan.asked, config),
        "config": config.model_dump(mode="json"),
    }


def _loser(plan: Plan, chosen: Tried, other: Tried) -> dict[str, Any]:
    slower = other.step_s / chosen.step_s - 1
    if slower >= _ANY:
        why = f"{slower:.1%} slower"
    elif slower > -_ANY:
        why = "as fast, and further from fp32"
    else:
        why = f"{-slower:.1%} faster, less than estimates are true to, and further from fp32"
    return _setting(plan, other) | {"slower": slower, "why": why}


def _nearest(plan: Plan) -> dict[str, Any]:
    near, room = plan.nearest, plan.room
    larger = _larger_gpu(plan)
    return _setting(plan, near) | {
        "missing_gib": near.reserved_gib - room.usable_gib,
        "smallest_budget_gib": room.budget_for(near.reserved_gib),
        "smallest_memory_gib": room.memory_for(near.reserved_gib),
        "smallest_gpu": larger,
    }


def _larger_gpu(plan: Plan) -> str | None:
    """The smallest GPU that is usually shown on which the nearest setting fits; None: none is."""
    needed = plan.room.memory_for(plan.nearest.reserved_gib)
    enough = [gpu for gpu in (*GPUS, *ALL_GPUS) if gpu.memory_gib >= needed]
    return min(enough, key=lambda gpu: gpu.memory_gib).name if enough else None


def _enough(plan: Plan) -> str:
    """With what the nearest setting would fit."""
    room, near = plan.room, plan.nearest
    budget, memory = room.budget_for(near.reserved_gib), room.memory_for(near.reserved_gib)
    if room.budget_gib is not None and (
        room.gpu == gpu_with(room.budget_gib) or memory <= room.gpu.memory_gib
    ):
        return f"a budget of {gib(budget)}"
    gpu = _larger_gpu(plan)
    if gpu is None:
        return f"a GPU of {gib(memory)}, which none has: take several (--gpus)"
    return f"a GPU of {gib(memory)}, for example {gpu} ({find_gpu(gpu).memory_gib:g} GiB)"


def reasons(plan: Plan, chosen: Tried) -> list[Reason]:
    """One for each choice."""
    return [
        *_of_batch(plan, chosen),
        *_of_activations(plan, chosen),
        *_of_states(plan, chosen),
        *_of_loss(plan, chosen),
    ]


def _compared(
    plan: Plan, chosen: Tried, choice: str, words: str, instead: str, other: Tried
) -> Reason:
    """`other` beside `chosen`, of which this one `choice` differs."""
    if not plan.search.fits(other):
        missing = other.reserved_gib - plan.room.usable_gib
        why = f"not {instead}, which lacks {gib(missing)}"
        return Reason(choice, words, instead, missing, None, why)
    slower = other.step_s / chosen.step_s - 1
    if slower >= _ANY:
        why = f"not {instead}, which is {slower:.1%} slower"
    elif slower > -_ANY:
        why = f"not {instead}, which is as fast"
    else:
        why = f"not {instead}, which gains {-slower:.1%}, less than estimates are true to"
    return Reason(choice, words, instead, None, slower, why)


def _of_batch(plan: Plan, chosen: Tried) -> Iterator[Reason]:
    config, sizes = chosen.config, plan.search.sizes
    larger = [size for size in sizes if size > config.batch_size]
    words = batch_words(config)
    if not larger:
        why = "the whole step at once" if len(sizes) > 1 else "the only one possible"
        yield Reason("micro_batch", words, None, None, None, why)
        return
    other = plan.search.look(config, larger[0], chosen.rank)
    yield _compared(
        plan, chosen, "micro_batch", words, f"micro-batch {other.config.batch_size:,}", other
    )


def _of_activations(plan: Plan, chosen: Tried) -> Iterator[Reason]:
    config = chosen.config
    words = checkpoint_words(config)
    if plan.offloaded:
        yield _of_offload(plan, chosen)
        return
    lighter = _lighter(plan, config)
    if lighter is None:
        all_kept = config.grad_checkpoint == "none"
        why = "nothing is computed twice" if all_kept else "as it was set"
        yield Reason("activations", words, None, None, None, why)
        return
    other = plan.search.look(lighter, config.batch_size, chosen.rank)
    yield _compared(plan, chosen, "activations", words, checkpoint_words(lighter), other)


def _lighter(plan: Plan, config: TrainConfig) -> TrainConfig | None:
    """`config` with one block less computed again, or the next lighter kind; None: there was no
    choice."""
    first, others = config.checkpoint_blocks, config.checkpoint_others
    if first is not None and _is_possible(plan, config):
        return None  # it was set
    if first is not None and first > 1:
        return config.model_copy(update={"checkpoint_blocks": first - 1})
    modes: list[GradCheckpoint] = [each["grad_checkpoint"] for each in CHECKPOINTS]
    mode = others if first is not None else modes[max(0, modes.index(config.grad_checkpoint) - 1)]
    if mode == config.grad_checkpoint:
        return None
    lighter = config.in_every_block(mode)
    return lighter if _is_possible(plan, lighter) else None


def _is_possible(plan: Plan, config: TrainConfig) -> bool:
    """Whether the plan had the choice of a configuration of that kind."""
    kinds = [kind for chain in plan.chains for kind in chain.kinds]
    update = {"batch_size": 0, "grad_accum": 0}
    return config.model_copy(update=update) in [kind.model_copy(update=update) for kind in kinds]


def _of_offload(plan: Plan, chosen: Tried) -> Reason:
    words = checkpoint_words(chosen.config)
    here = [tried.reserved_gib for tried in plan.search.tried.values() if not tried.host_gib]
    least = min(here, default=min((chain.kept_gib for chain in plan.on_gpu), default=0.0))
    missing = least - plan.room.usable_gib
    instead = "without host memory"
    why = f"nothing fits {instead}: at least {gib(missing)} are missing"
    return Reason("activations", words, instead, missing, None, why)


def _of_states(plan: Plan, chosen: Tried) -> Iterator[Reason]:
    words = states_words(chosen.config)
    loss = chosen.config.loss
    nearer = [c for c in plan.chains if c.rank < chosen.rank and c.loss == loss]
    if not nearer:
        why = "the nearest to fp32 that is possible"
        yield Reason("states", words, None, None, None, why)
    for chain in nearer:
        instead = states_words(chain.kinds[0])
        if plan.search.possible(chain):
            own = [tried.step_s for tried in plan.known if tried.rank == chain.rank]
            slower = min(own, default=_others_take_s(plan)) / chosen.step_s - 1
            least = "" if own else "at least "
            why = f"not {instead}, {least}{slower:.1%} slower"
            yield Reason("states", words, instead, None, slower, why)
        else:
            of_it = [tried for tried in plan.search.tried.values() if tried.rank == chain.rank]
            least_gib = min((tried.reserved_gib for tried in of_it), default=chain.kept_gib)
            missing = least_gib - plan.room.usable_gib
            why = f"not {instead}, which lacks at least {gib(missing)}"
            yield Reason("states", words, instead, missing, None, why)


def _others_take_s(plan: Plan) -> float:
    """What settings nearer to fp32 than the chosen one take at the least, if they are not known."""
    return max(plan.known[:KNOWN][-1].step_s, plan.known[0].step_s * (1 + TIE))


def _of_loss(plan: Plan, chosen: Tried) -> Iterator[Reason]:
    config, words = chosen.config, loss_words(chosen.config)
    other = "full" if config.loss == "fused" else "fused"
    chunks = {chain.loss: chain.kinds[0].loss_chunk for chain in plan.on_gpu}
    if other not in chunks:
        yield Reason("loss", words, None, None, None, "as it was set")
        return
    with_other = config.model_copy(update={"loss": other, "loss_chunk": chunks[other]})
    tried = plan.search.look(with_other, config.batch_size, chosen.rank)
    yield _compared(plan, chosen, "loss", words, loss_words(with_other), tried)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The plan below its first line, a paragraph each, the long ones still to be wrapped."""
    budget = "" if found["budget_gib"] is None else f" within a budget of {found['budget_gib']:g}"
    yield (
        f"{found['tokens_per_step']:,} tokens a step in sequences of {found['seq_len']:,} on "
        f"{found['gpus']} x {found['gpu']}{budget}: at most {gib(found['usable_gib'])} may be "
        f"reserved; {gib(found['spare_gib'])} stay free, for {found['margin_source']}."
    )
    if found["plan"] is None:
        return
    yield ""
    yield "Why:"
    for _, same in itertools.groupby(found["reasons"], key=lambda reason: reason["choice"]):
        of_it = list(same)
        yield f"  {of_it[0]['chosen']}; {'; '.join(reason['reason'] for reason in of_it)}."
    if found["next"]:
        yield ""
        yield "The next best:"
    for other in found["next"]:
        yield (
            f"  {other['words']}: {gib(other['reserved_gib'])}, about "
            f"{rounded(other['tokens_per_s']):,} tokens/s; {other['why']}."
        )
    yield ""
    yield f"Speeds: {found['plan']['rates']}; settings within {TIE:.0%} count as equally fast."
