"""What two runs differ in: settings, then results, then everything else. For notebooks and for the
command line."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lsai_core.base.errors import UserError
from lsai_core.config.strict import flatten
from lsai_core.config.train import LOSSES
from lsai_lab.runs.older import config_in_todays_words
from lsai_lab.runs.records import Run
from lsai_lab.runs.result_names import OF_A_TEXT
from lsai_lab.runs.schema import BOTH, DERIVED
from lsai_lab.runs.so_far import so_far

# The results that people compare, and what they are called.
RESULTS = {
    "tokens_per_s": "tokens/s",
    "step_ms": "step ms",
    "mfu": "MFU %",
    "mem_forward_peak_gib": "fwd GiB",
    "mem_backward_peak_gib": "bwd GiB",
    "mem_peak_allocated_gib": "peak GiB",
    "largest_batch": "max batch",
    "validation_loss": "val loss",
    "validation_perplexity": "val ppl",
}

_TIMED = ("results.tokens_per_s", "results.step_ms", "results.mfu")
_SAME_PEAK = 1.05  # measured peaks of one device differ by so much


def in_unit(result: str, value: Any) -> Any:
    """A result (a number, a column, or None) in the unit of its heading in `RESULTS`: MFU, which
    records keep as a share, in percent."""
    return value if value is None or result != "mfu" else 100 * value


def above_peak(results: Mapping[str, Any], before: str = "") -> str:
    """Why an MFU is above 100 %; empty if it is not. `before`: what stands before the names."""
    share, peak = results.get(f"{before}mfu"), results.get(f"{before}mfu_peak_tflops")
    if not isinstance(share, int | float) or share <= 1:
        return ""
    known = f"{peak:.3g} TFLOP/s, " if isinstance(peak, int | float) else ""
    source = results.get(f"{before}mfu_peak_source") or "of unknown source"
    return f"MFU is above 100 %, for the run was faster than its peak ({known}{source})"


def several_peaks(peaks: Iterable[float | None]) -> str:
    """Why MFU that are shares of these peaks (TFLOP/s) do not compare; empty if they do."""
    there = [float(peak) for peak in peaks if peak is not None]
    if not there or max(there) <= _SAME_PEAK * min(there):
        return ""
    least, most = f"{min(there):.4g}", f"{max(there):.4g}"
    return f"no ratio of MFU: they are shares of several peaks, {least} to {most} TFLOP/s"


class Beside(NamedTuple):
    """A line of a comparison: what it is, both values, and how the second stands to the first: of
    losses the difference, of other numbers the ratio, where they compare."""

    what: str
    first: Any
    second: Any
    ratio: float | None
    difference: float | None

    @property
    def change(self) -> str:
        """The ratio or the difference, in words."""
        return change_words(self.ratio, self.difference)


def change_words(ratio: float | None, difference: float | None) -> str:
    """`0.504x`, or `-0.0012`; nothing where neither is there."""
    if difference is not None and difference == difference:
        return f"{difference:+.3g}"
    return f"{ratio:.3g}x" if ratio is not None and ratio == ratio else ""


@dataclass(frozen=True)
class Difference:
    """Facts of two runs by dotted key, and the keys in which they differ, by kind."""

    one: dict[str, Any]
    other: dict[str, Any]
    settings: list[str]
    results: list[str]
    rest: list[str]

    @property
    def keys(self) -> list[str]:
        """All keys in which the two differ."""
        return [key for key in self.one | self.other if self.one.get(key) != self.other.get(key)]

    @property
    def remark(self) -> str:
        """Why some results of the two do not compare; empty if all do."""
        peaks = (self._two_peaks, self._above_peak)
        whose = (self._two_texts, self._two_losses, *peaks, self._two_machines, self._disturbed)
        return "\n".join(filter(None, whose))

    @property
    def _two_machines(self) -> str:
        """That speeds of the two do not compare, as those of two machines; empty if they do."""
        one, other = (facts.get("machine") for facts in (self.one, self.other))
        if one == other or not any(key in self.results for key in _TIMED):
            return ""
        return f"speeds of two machines do not compare: {one} and {other}"

    @property
    def _disturbed(self) -> str:
        """Which of the two shared its machine while it was timed; empty if none did."""
        whose = [
            name
            for name, facts in (("the first", self.one), ("the second", self.other))
            if facts.get("results.disturbed")
        ]
        if not whose or not any(key in self.results for key in _TIMED):
            return ""
        were = "were" if len(whose) > 1 else "was"
        return f"speeds compare poorly: {' and '.join(whose)} {were} disturbed"

    @property
    def _two_texts(self) -> str:
        """Why losses of the two do not compare; empty if they do: they are of the same tokens."""
        texts = [facts.get("results.dataset") for facts in (self.one, self.other)]
        losses = any(key.endswith(OF_A_TEXT) for key in self.results)
        if not losses or None in texts or texts[0] == texts[1]:
            return ""
        return (
            f"losses do not compare: {texts[0]} and {texts[1]} are two texts, or one text in other "
            f"tokens, and a loss is per token of its text"
        )

    @property
    def _two_losses(self) -> str:
        """That training losses of the two do not compare, as those of two functions; empty if they
        do. Validation is cross entropy, whatever a run trained with."""
        one, other = (loss_function(facts.get("config.loss")) for facts in (self.one, self.other))
        if one == other or not any(key.endswith(OF_A_TEXT) for key in self.results):
            return ""
        return f"training losses do not compare: {one} and {other} are two functions"

    @property
    def _two_peaks(self) -> str:
        """Why the MFU of the two do not compare; empty if they do: they are shares of one peak."""
        found = [facts.get("results.mfu_peak_tflops") for facts in (self.one, self.other)]
        return several_peaks(found) if "results.mfu" in self.results else ""

    @property
    def _above_peak(self) -> str:
        """Which of the two has an MFU above 100 %, and why; empty if none has."""
        whose = (("the first", self.one), ("the second", self.other))
        said = [(name, above_peak(facts, "results.")) for name, facts in whose]
        return "\n".join(f"{name}: {why}" for name, why in said if why)

    def beside(self, key: str) -> Beside:
        """A line of the comparison, called as the column of `lab.load`."""
        name = self._column(key)
        first, second = (facts.get(key) for facts in (self.one, self.other))
        return Beside(name, first, second, *self.change(name, first, second))

    def _column(self, key: str) -> str:
        """What `lab.load` calls a fact: a setting that a result is called like keeps `config.`."""
        name = key.removeprefix("config.").removeprefix("results.")
        is_taken = name in (*DERIVED, *BOTH) or f"results.{name}" in self.one | self.other
        return key if key.startswith("config.") and is_taken else name

    def change(self, name: str, first: Any, second: Any) -> tuple[float | None, float | None]:
        """From the first of two numbers to the second: of losses their difference, of all else
        their ratio (ratio, difference); neither for losses on two texts, shares of several peaks,
        speeds of two machines, and what is no number."""
        there = all(type(value) in (int, float) for value in (first, second))
        of_text, timed = name.endswith(OF_A_TEXT), f"results.{name}" in _TIMED
        trained = of_text and not name.startswith("validation_")
        apart = (of_text and self._two_texts) or (trained and self._two_losses)
        apart = apart or (timed and self._two_machines)
        if not there or apart or (name == "mfu" and self._two_peaks):
            return None, None
        if name.endswith("_loss"):
            return None, second - first
        return (second / first if first else None), None


def loss_function(setting: Any) -> str:
    """What the setting `loss` computes: the package's own ways give one and the same."""
    return "cross entropy" if setting is None or setting in LOSSES else str(setting)


def differing(number: int, what: str) -> str:
    """So many things differ, in words: `1 setting differs`, `2 settings differ`."""
    return f"1 {what} differs" if number == 1 else f"{number} {what}s differ"


def difference(one: Run, other: Run) -> Difference:
    """What the two runs differ in; of a run that has not ended the settings."""
    first, second = _facts(one), _facts(other)
    keys = [key for key in first | second if first.get(key) != second.get(key)]
    settings = [key for key in keys if key.startswith("config.")]
    results = [key for key in (f"results.{name}" for name in RESULTS) if key in keys]
    rest = [key for key in keys if key not in {*settings, *results}]
    return Difference(first, second, settings, results, rest)


def _settings(run: Run) -> dict[str, Any]:
    """The settings of a run, with the defaults of those that its record is too old to have; as
    they stand in the record where today's words cannot say them."""
    try:
        return config_in_todays_words(run).model_dump(mode="json")
    except UserError:
        return run.config


def _facts(run: Run) -> dict[str, Any]:
    summary = run.summary
    parts = {
        "config": _settings(run),
        "env": run.env,
        "code": summary.code,
        "results": summary.results | so_far(run),
    }
    return {
        "run": str(summary.id),
        "machine": run.machine,
        "outcome": summary.outcome,
        "started": summary.started,
    } | flatten(parts)


def planned_profile(run: Run) -> str | None:
    """The profile under which a run was planned, as its command names it."""
    found = re.search(r"(?:--profile[ =]|\bprofile )([\w.-]+)", run.plan.get("command") or "")
    return found[1] if found else None


def _which(run: Run) -> tuple[str, str, str]:
    return run.summary.id.study, run.summary.id.variant, run.summary.id.part


def overrides_in(command: str) -> str:
    """The settings that the command or the notebook of a run changed, in a line; empty if none."""
    said = re.search(r"overrides \{(.*)\}$", command)
    return said[1].replace("'", "") if said else ", ".join(re.findall(r"--set[ =](\S+)", command))


def settings_apart(runs: Iterable[Run]) -> dict[Path, dict[str, str]]:
    """The settings, the seed left out, in which each run differs from any of the same study,
    variant and part. A setting that an older record does not have is no difference."""
    groups = defaultdict(list)
    for run in runs:
        config = {key: repr(value) for key, value in flatten(run.config).items() if key != "seed"}
        groups[_which(run)].append((run.folder, config))
    apart = {}
    for group in groups.values():
        keys = sorted({key for _, config in group for key in config})
        differ = [
            key for key in keys if len({config[key] for _, config in group if key in config}) > 1
        ]
        for folder, config in group:
            apart[folder] = {key: config[key] for key in differ if key in config}
    return apart
