"""The memory of a step over its time, by purpose, in a fixed number of slices.

Steps of different techniques have different numbers of events. Cut into equal slices of each phase
they can be laid over one another.
"""

from collections import Counter
from collections.abc import Sequence

from lsai_core.prediction.tracker import Moment

SLICES = {"forward": 24, "backward": 40, "optimizer": 8}  # of the step's phases, in their order


def timeline(moments: Sequence[Moment], messages: int) -> dict[str, list[int]]:
    """Bytes of each purpose at the highest moment of each slice (`SLICES`), so that the highest
    sum over the purposes is the step's peak.

    `moments`: `PurposeTracker.levels`. `messages`: bytes that are on their way in the forward and
    the backward pass.
    """
    highest: list[Counter[str]] = []
    for phase, slices in SLICES.items():
        risen = [moment for moment in moments if moment.phase == phase and moment.rose]
        found = [(moment.events, moment.bytes_of) for moment in risen]
        first, last = (found[0][0], found[-1][0]) if found else (0, 0)
        best = [Counter[str]() for _ in range(slices)]
        for at, bytes_of in found:
            place = min(slices - 1, (at - first) * slices // max(1, last - first))
            best[place] = max(best[place], bytes_of, key=Counter.total)
        for place, bytes_of in enumerate(best):
            if not bytes_of:  # nothing was born here
                best[place] = best[place - 1] if place else (highest or best)[-1]
            elif phase != "optimizer":
                best[place] = bytes_of + Counter({"messages": messages})
        highest += best
    purposes = {purpose: None for bytes_of in highest for purpose, size in bytes_of.items() if size}
    return {purpose: [bytes_of[purpose] for bytes_of in highest] for purpose in purposes}
