"""Pictures of one training step as plain SVG: its memory by cause, and its kernels as lanes.

Each shape says what it is where the pointer rests (`<title>`), and the whole is told in words for
readers who cannot see it. Nothing is fetched and nothing runs.
"""

import html
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from lsai_core.profiling.trace import KERNEL_CLASSES, KernelEvent
from lsai_lab.report.colors import COLORS, GRAY

GIB = 2**30
WIDTH, LEFT, RIGHT, TOP = 960, 62, 12, 34
HEIGHT = 260  # of the memory's axes
LANE = 22
_BINS = 320  # moments that are drawn; of those that fall together the highest
_LOWEST = ("weights", "optimizer", "gradients")  # what a step keeps, at the bottom
_INNER = 0.5  # of an operator's span must be its own, or it is drawn by those in it

Moments = Sequence[tuple[str, Mapping[str, int]]]
Curve = Sequence[tuple[float, float]]  # ms and GiB
_Scale = Callable[[float], float]


def memory_picture(
    moments: Moments,
    *,
    title: str = "Memory of a step by cause",
    measured: Mapping[str, float] | None = None,
    recorded: Curve = (),
) -> str:
    """The bytes of each moment, stacked by cause, from left to right as the step goes on.

    `measured`: peaks (GiB) of phases in the real run, drawn as dashed lines. `recorded`: GiB over
    ms of the real run, drawn beside in axes of their own, of the same height.
    """
    kept, measured = thinned(moments), measured or {}
    found = dict.fromkeys(cause for _, sizes in moments for cause in sizes)
    causes = [
        *(cause for cause in _LOWEST if cause in found),
        *(c for c in found if c not in _LOWEST),
    ]
    totals = [sum(sizes.values()) / GIB for _, sizes in kept]
    top = 1.08 * max([*totals, *measured.values(), *(gib for _, gib in recorded), 1e-9])
    wide = (WIDTH - LEFT - RIGHT) * (0.62 if recorded else 1)

    def x(at: float) -> float:
        return LEFT + wide * at / max(1, len(kept))

    def y(gib: float) -> float:
        return TOP + HEIGHT * (1 - gib / top)

    marks = [*_axis(top, y, LEFT), *_areas(kept, causes, x, y), *_phases(kept, measured, x, y)]
    peak = max(range(len(kept)), key=totals.__getitem__)
    told = f"peak {totals[peak]:.3g} GiB in the {kept[peak][0]}"
    side = "start" if peak < len(kept) / 5 else "end" if peak > len(kept) * 4 / 5 else "middle"
    level = y(max([totals[peak], *measured.values()])) - 5  # above the dashed lines, too
    marks.append(_text(x(peak), level, told, side))
    if recorded:
        marks += _recorded(recorded, LEFT + wide + 60, y)
    marks += _legend(causes, TOP + HEIGHT + 34)
    words = _words(kept[peak][1], told, measured, recorded)
    return _svg(title, words, TOP + HEIGHT + 34 + 20 * -(-len(causes) // 5), marks)


def lanes(events: Sequence[KernelEvent], title: str = "Kernels of the traced steps") -> str:
    """Kernels, or on a CPU operators, over time, a lane for each class; those that touch are drawn
    as one."""
    begin = min(event.start_ms for event in events)
    end = max(event.end_ms for event in events)
    wide = (WIDTH - 2 * LEFT - RIGHT - 60) / max(end - begin, 1e-9)
    left = 2 * LEFT + 60
    by_class: dict[str, list[KernelEvent]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start_ms):
        if event.on_gpu or event.ms >= _INNER * (event.end_ms - event.start_ms):
            by_class[event.label].append(event)
    marks, spent = [], {}
    classes = [name for name in KERNEL_CLASSES if name in by_class]
    for row, name in enumerate(classes):
        top = TOP + row * LANE
        spent[name] = sum(event.ms for event in by_class[name])
        marks.append(_text(left - 8, top + 14, f"{name} {spent[name]:,.3g} ms", "end"))
        marks += [
            _rect(
                left + wide * (first - begin),
                top + 2,
                max(0.6, wide * (last - first)),
                LANE - 5,
                COLORS[name],
                said,
            )
            for first, last, said in _merged(by_class[name], 0.6 / wide)
        ]
    bottom = TOP + len(classes) * LANE
    for share in (0, 0.25, 0.5, 0.75, 1):
        at = left + wide * (end - begin) * share
        marks.append(_line(at, TOP, at, bottom, 'stroke-opacity="0.25"'))
        side = "end" if share == 1 else "middle"
        marks.append(_text(at, bottom + 16, f"{(end - begin) * share:,.3g} ms", side))
    words = ", ".join(f"{name} {ms:,.3g} ms" for name, ms in spent.items())
    return _svg(title, f"Over {end - begin:,.3g} ms: {words}.", bottom + 26, marks)


def thinned(moments: Moments) -> list[tuple[str, Mapping[str, int]]]:
    """At most some hundred moments: of each stretch the highest, phases kept apart."""
    size = max(1, -(-len(moments) // _BINS))
    kept = []
    for _, phase in itertools.groupby(moments, key=lambda moment: moment[0]):
        within = list(phase)
        for begin in range(0, len(within), size):
            stretch = within[begin : begin + size]
            kept.append(max(stretch, key=lambda moment: sum(moment[1].values())))
    return kept


def _areas(kept: Moments, causes: Sequence[str], x: _Scale, y: _Scale) -> Iterable[str]:
    below = [0.0] * len(kept)
    for cause in causes:
        above = [
            low + sizes.get(cause, 0) / GIB for low, (_, sizes) in zip(below, kept, strict=True)
        ]
        edge = [(at + side, size) for at, size in enumerate(above) for side in (0, 1)]
        floor = [(at + side, size) for at, size in enumerate(below) for side in (0, 1)]
        points = " ".join(f"{x(at):.1f},{y(size):.1f}" for at, size in [*edge, *floor[::-1]])
        most = max(sizes.get(cause, 0) for _, sizes in kept) / GIB
        said = html.escape(f"{cause}: at most {most:.3g} GiB")
        fill = COLORS.get(cause, GRAY)
        yield f'<polygon points="{points}" fill="{fill}"><title>{said}</title></polygon>'
        below = above


def _phases(kept: Moments, measured: Mapping[str, float], x: _Scale, y: _Scale) -> Iterable[str]:
    at = 0
    for phase, group in itertools.groupby(kept, key=lambda moment: moment[0]):
        count = len(list(group))
        yield _text((x(at) + x(at + count)) / 2, TOP + HEIGHT + 16, phase, "middle")
        yield _line(x(at + count), TOP, x(at + count), TOP + HEIGHT, 'stroke-opacity="0.4"')
        if phase in measured:
            said = f"measured peak of the {phase}: {measured[phase]:.3g} GiB"
            dash = 'stroke-dasharray="6 3" stroke-width="2"'
            level = y(measured[phase])
            yield _line(x(at), level, x(at + count), level, dash, said)
        at += count


def _recorded(curve: Curve, left: float, y: _Scale) -> Iterable[str]:
    begin, end = curve[0][0], curve[-1][0]
    wide = (WIDTH - RIGHT - left) / max(end - begin, 1e-9)
    points = " ".join(f"{left + wide * (ms - begin):.1f},{y(gib):.1f}" for ms, gib in curve)
    said = f"recorded: at most {max(gib for _, gib in curve):.3g} GiB"
    yield (
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5">'
        f"<title>{said}</title></polyline>"
    )
    yield _line(left, TOP, left, TOP + HEIGHT)
    yield _text(left, TOP + HEIGHT + 16, f"recorded, {end - begin:,.3g} ms", "start")


def _legend(causes: Sequence[str], top: float) -> Iterable[str]:
    for number, cause in enumerate(causes):
        left, row = LEFT + 176 * (number % 5), top + 20 * (number // 5)
        yield _rect(left, row - 10, 12, 12, COLORS.get(cause, GRAY), cause)
        yield _text(left + 18, row, cause, "start")


def _axis(top: float, y: _Scale, left: float) -> Iterable[str]:
    from matplotlib.ticker import MaxNLocator

    for gib in MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(0, top):
        if gib > top:
            break
        level = y(gib)
        yield _line(left, level, WIDTH - RIGHT, level, 'stroke-opacity="0.15"')
        yield _text(left - 6, level + 4, f"{gib:.3g}", "end")
    yield _text(left - 6, TOP - 14, "GiB", "end")


def _merged(events: Sequence[KernelEvent], gap_ms: float) -> Iterable[tuple[float, float, str]]:
    """Stretches of events (in order) with at most `gap_ms` between them: begin, end, words."""
    stretch: list[KernelEvent] = []
    last = 0.0
    for event in events:
        if stretch and event.start_ms > last + gap_ms:
            yield stretch[0].start_ms, last, _said(stretch)
            stretch = []
        last = max(event.end_ms, last) if stretch else event.end_ms
        stretch.append(event)
    if stretch:
        yield stretch[0].start_ms, last, _said(stretch)


def _said(stretch: Sequence[KernelEvent]) -> str:
    longest = max(stretch, key=lambda event: event.ms)
    if len(stretch) == 1:
        return f"{longest.name[:80]}: {longest.ms:.3g} ms"
    total = sum(event.ms for event in stretch)
    return f"{len(stretch)} of {total:.3g} ms, the longest {longest.name[:80]}: {longest.ms:.3g} ms"


def _words(
    at_peak: Mapping[str, int], told: str, measured: Mapping[str, float], recorded: Curve
) -> str:
    parts = ", ".join(f"{cause} {size / GIB:.3g}" for cause, size in Counter(at_peak).most_common())
    said = f"{told}: {parts} GiB."
    if measured:
        said += f" Measured: {', '.join(f'{p} {gib:.3g} GiB' for p, gib in measured.items())}."
    if recorded:
        said += f" Recorded beside it: at most {max(gib for _, gib in recorded):.3g} GiB."
    return said


def _rect(x: float, y: float, width: float, height: float, color: str, said: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{color}"><title>{html.escape(said)}</title></rect>'


def _line(x1: float, y1: float, x2: float, y2: float, more: str = "", said: str = "") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    title = f"<title>{html.escape(said)}</title>" if said else ""
    return f'<line {ends} stroke="currentColor" {more}>{title}</line>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="13" fill="currentColor"'
    return f"<text {place}>{html.escape(text)}</text>"


def _svg(title: str, words: str, height: float, marks: Iterable[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="100%"'
    head = f"<title>{html.escape(title)}</title><desc>{html.escape(words)}</desc>"
    heading = f'<text x="{LEFT}" y="16" font-size="14" font-weight="bold" fill="currentColor">'
    heading += f"{html.escape(title)}</text>"
    label = html.escape(f"{title}: {words}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" {size} '
        f'font-family="sans-serif">{head}{heading}{"".join(marks)}</svg>'
    )
