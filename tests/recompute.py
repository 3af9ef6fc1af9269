"""Every claim computed a second time, from the rows that each run wrote, by code that shares none
with the package: numpy, and yaml for the declarations.

    python tests/recompute.py [checkout]

reads `params/claims.yaml`, `params/datasets.yaml` and `reports/recorded`, and compares with
`claims.json` there: value, range, number of runs, verdict, dates, amount of text. It prints a line
a claim and ends with 1 if one differs. Peaks of memory have no rows of their own: they are the
largest of the phases' peaks, and the steps' own figures must agree with them.
"""

import json
import math
import re
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import yaml
from recompute_estimators import estimators
from recompute_rivals import rivals

LAST = 100  # steps whose mean is a run's training loss
LOSSES = ("interval", "relative_interval")


class Run:
    """One recorded run: what its files say, read when asked."""

    def __init__(self, folder):
        self.folder, self.machine = folder, folder.parts[-3]
        self.summary = json.loads((folder / "summary.json").read_text())
        self.id, self.ok = self.summary["id"], self.summary["outcome"] == "ok"
        self.results, self.started = self.summary["results"], self.summary["started"]
        self.name = "/".join(folder.parts[-3:])

    def rows(self):
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.open()] if path.exists() else []

    def config(self):
        return json.loads((self.folder / "config.json").read_text())


def newest_runs(recorded):
    """Of each run that was tried again the newest, by machine, study, part, variant and repeat."""
    found = {}
    for path in recorded.glob("*/*/*/summary.json"):
        run = Run(path.parent)
        key = (run.machine, *(run.id[name] for name in ("study", "part", "variant", "repeat")))
        if key not in found or found[key].started < run.started:
            found[key] = run
    return [found[key] for key in sorted(found)]


# Figures, from rows.


def speed(run):
    """Tokens a second: those of a step over the median time of the steady steps; older records say
    nothing of steadiness, and there the first ten are left out."""
    rows = [row for row in run.rows() if row.get("steady", row["step"] >= 10)]
    return 1e3 * rows[0]["tokens_in_step"] / np.median([row["step_ms"] for row in rows])


def validation(run):
    found = [row["validation_loss"] for row in run.rows() if row.get("validation_loss") is not None]
    return found[-1]


def training(run):
    return np.mean([row["loss"] for row in run.rows() if row.get("loss") is not None][-LAST:])


def peak_memory(run):
    phases = [run.results.get(f"mem_{phase}_peak_gib") for phase in ("forward", "backward")]
    phases.append(run.results.get("mem_optimizer_peak_gib"))
    known = [peak for peak in phases if peak is not None]
    peak = max(known) if known else run.results["mem_peak_allocated_gib"]
    steps = max(row.get("memory_allocated_gib", 0) for row in run.rows())
    assert abs(steps / peak - 1) < 1e-3, (run.name, steps, peak)
    return peak


def rate(run, metric):
    """TFLOP/s of one point of a bench: causal_8192_fa4 of a kernel, ulysses_8192 of a method."""
    words = metric.removesuffix("_tflops").split("_")
    wanted = {"measure": "time", "length": int(words[1])}
    wanted |= {"method": words[0]} if len(words) == 2 else {"mask": words[0], "backend": words[2]}
    points = [row for row in run.rows() if all(row.get(key) == wanted[key] for key in wanted)]
    good = [row["training_tflops"] for row in points if row["outcome"] == "ok"]
    return good[0] if good else math.nan


def largest(run):
    """The row of the largest size that a search found to train."""
    return max((row for row in run.rows() if row["outcome"] == "ok"), key=lambda row: row["size"])


def weights_share(run):
    gib = 2 * largest(run)["parameters"] / 2**30  # bf16
    return gib / run.results["world_size"] / run.results["search_limit_gib"]


FIGURES = {
    "tokens_per_s": speed,
    "tokens_per_s_per_gpu": lambda run: speed(run) / run.results["world_size"],
    "validation_loss": validation,
    "validation_perplexity": lambda run: math.exp(validation(run)),
    "mem_peak_allocated_gib": peak_memory,
    "parameters": lambda run: largest(run)["parameters"],
    "step_s": lambda run: largest(run)["step_s"],
    "weights_share": weights_share,
    "largest_batch": lambda run: max(
        one["size"] for one in run.results["tries"] if one["outcome"] == "ok"
    ),
}


def listed(value):
    return value if isinstance(value, list) else [value]


class Judge:
    """One claim and the runs of its machine."""

    def __init__(self, claim, runs, distinct):
        self.claim, self.distinct = claim, distinct
        self.runs = [run for run in runs if run.machine == claim.get("machine", "h200")]
        self.used = []

    def term(self, key):
        given = self.claim[key]
        given = given if isinstance(given, dict) else {"variant": given}
        own = {name: self.claim.get(name) for name in ("study", "part", "metric")}
        term = {**own, **given}
        return {name: listed(term[name] or "train") for name in ("study", "part", "metric")} | {
            "variant": listed(term["variant"])
        }

    def of(self, term, variant):
        return [
            run
            for run in self.runs
            if run.id["variant"] == variant
            and run.id["study"] in term["study"]
            and run.id["part"] in term["part"]
        ]

    def lacks_runs(self):
        """Whether a claim that compares waits for good runs: of any setting, or a ratio of all."""
        enough = any if self.claim["kind"] == "ratio" else all
        keys = [key for key in ("of", "over", "beside") if self.claim.get(key)]
        terms = [self.term(key) for key in keys] if "over" in self.claim else []
        have = [[any(r.ok for r in self.of(t, name)) for name in t["variant"]] for t in terms]
        return not all(map(enough, have))

    def values(self, term, variant, metric):
        """repeat -> figure of the good runs that have it."""
        figure = FIGURES.get(metric) or (lambda run: rate(run, metric))
        found = {run.id["repeat"]: figure(run) for run in self.of(term, variant) if run.ok}
        return {repeat: value for repeat, value in found.items() if not math.isnan(value)}

    def best(self, key, smallest=False):
        """The best variant or metric: its figure, and that of each repeat."""
        term, found = self.term(key), []
        for variant in term["variant"]:
            if key != "beside":
                self.used += self.of(term, variant)
            for metric in term["metric"]:
                values = self.values(term, variant, metric)
                if values:
                    found.append((np.median([*values.values()]), values))
        return (min if smallest else max)(found, key=lambda pair: pair[0])

    def has_runs(self):
        terms = [self.term(key) for key in ("of", "over")]
        return all(self.of(term, variant) for term in terms for variant in term["variant"])

    def keeps(self, value):
        low, high = self.claim.get("at_least", -math.inf), self.claim.get("at_most", math.inf)
        return low <= value <= high

    def figure(self):
        value, each = self.best("of", "at_most" in self.claim)
        if self.claim["kind"] == "ratio":
            over, lower = self.best("over")
            shared = sorted(each.keys() & lower.keys())
            several = min(len(each), len(lower)) > 1
            each = [each[r] / lower[r] for r in shared] if several else [value / over]
            value /= over
        else:
            each = [*each.values()]
        return self.repeated(value, each)

    def repeated(self, value, each):
        n, needed = max(1, len(each)), self.claim.get("repeats", 1)
        kept = self.keeps(value) and all(map(self.keeps, each))
        verdict = "failed" if not kept else "held" if n >= needed else "incomplete"
        low, high = (min(each), max(each)) if len(each) > 1 else (None, None)
        return {"value": value, "low": low, "high": high, "n": n, "verdict": verdict}

    def curves(self):
        """The mean distance of the losses, step by step, from the base's, of the furthest setting;
        with `beside` as a multiple of that one's."""
        steps, over = self.claim.get("steps"), self.term("over")

        def losses(term, variant):
            runs = self.of(term, variant)
            self.used += [run for run in runs if run not in self.used]
            return {
                run.id["repeat"]: np.array([row["loss"] for row in run.rows()][:steps])
                for run in runs
                if run.ok
            }

        bases = losses(over, over["variant"][0])

        def gaps(key):
            term, found = self.term(key), {}
            for variant in term["variant"]:
                for repeat, curve in losses(term, variant).items():
                    if repeat in bases:
                        gap = np.abs(curve - bases[repeat]).mean()
                        found.setdefault(repeat, []).append(gap)
            return {r: max(all_) for r, all_ in found.items() if len(all_) == len(term["variant"])}

        found = gaps("of")
        if "beside" in self.claim:
            unit = gaps("beside")
            found = {r: found[r] / unit[r] for r in sorted(found.keys() & unit.keys())}
        each = [*found.values()]
        result = self.repeated(np.median(each), each) | self.text()
        return result | {"training_low": None, "training_high": None}

    def count(self):
        term, needed = self.term("of"), self.claim.get("repeats", 1)
        complete = 0
        for variant in term["variant"]:
            runs = self.of(term, variant)
            self.used += runs
            good = [run for run in runs if run.ok]
            if self.claim.get("metric"):
                good = [run for run in good if FIGURES[self.claim["metric"]](run) > 0]
            complete += len(good) == len(runs) >= needed
        verdict = "held" if complete == len(term["variant"]) else "failed"
        return {"value": complete, "low": None, "high": None, "n": needed, "verdict": verdict}

    def interval(self):
        """By 95 % intervals, joint for all settings, of the differences seed by seed."""
        term, over = self.term("of"), self.term("over")
        (metric,), (base,), total = term["metric"], over["variant"], len(term["variant"])
        needed, found = self.claim["repeats"], []
        bases = self.of(over, base)
        for variant in term["variant"]:
            runs = self.of(term, variant)
            self.used += runs
            found.append([*between(*paired(self, runs, bases, FIGURES[metric]), total), runs])
        self.used += bases
        rises = "at_least" in self.claim
        low, high, n, runs = max(found, key=lambda one: -one[0] if rises else max(-one[0], one[1]))
        value = low if rises else max(-low, high)
        nearest = [one[1] if rises else max(0, one[0], -one[1]) for one in found]
        if min(one[2] for one in found) < needed:
            verdict = "incomplete"
        elif self.keeps(value):
            verdict = "held"
        else:
            verdict = "undecided" if all(map(self.keeps, nearest)) else "failed"
        result = {"value": value, "n": n, "verdict": verdict, "low": None, "high": None}
        result |= {"training_low": None, "training_high": None} | self.text()
        if n > 1:
            ends = between(*paired(self, runs, bases, training), total)
            result |= {"low": low, "high": high}
            result |= {"training_low": ends[0], "training_high": ends[1]}
        return result

    def text(self):
        """Tokens of a run, distinct ones, passes over the training text."""
        (tokens,) = {run.results["tokens"] for run in self.used}
        (length,) = {run.config()["seq_len"] for run in self.used}
        (text,) = {self.distinct[run.results["dataset"]] for run in self.used}
        once = (text - 1) // length * length
        return {"tokens": tokens, "distinct_tokens": min(tokens, once), "passes": tokens / once}

    def dates(self, bound):
        """When the first run began, and whether the bound is younger, or nothing shows it not."""
        started = [datetime.fromisoformat(run.started) for run in self.used]
        before = bool(started) and bound is not None and bound <= min(started)
        return {"set_after": not before, "first_run": min(started) if started else None}

    def gpu_sets(self):
        """On how many sets of GPUs the runs were made; None if one does not say."""
        files = [json.loads((run.folder / "env.json").read_text()) for run in self.used]
        sets = {tuple(env.get("gpu_uuids") or ()) for env in files}
        return len(sets) if sets and () not in sets else None

    def equal(self):
        for fact in self.claim.get("same", []):
            assert len({str(run.results[fact]) for run in self.used if run.ok}) == 1, fact


def paired(judge, runs, bases, figure):
    """The differences of equal seeds, and whether to divide by the base's value."""
    base = {run.id["repeat"]: figure(run) for run in bases if run.ok}
    own = {run.id["repeat"]: figure(run) for run in runs if run.ok}
    shared = sorted(base.keys() & own.keys())
    relative = judge.claim["kind"] == "relative_interval"
    return [np.array([own[r] / base[r] - 1 if relative else own[r] - base[r] for r in shared])]


def between(differences, settings):
    """The ends of the interval of their mean, and their number; one has no width."""
    n, mean = len(differences), float(np.mean(differences))
    if n < 2:
        return mean, mean, n
    half = student(n - 1, 1 - 0.05 / settings) * np.std(differences, ddof=1) / math.sqrt(n)
    return mean - half, mean + half, n


def student(degrees, share):
    """The quantile of Student's t that so much of it lies within: by summing up its density, with
    t = sqrt(degrees) tan(angle)."""
    angle = np.linspace(0, math.pi / 2, 400_001)
    density = np.cos(angle) ** (degrees - 1)
    within = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(degrees) * math.tan(np.interp(share, within / within[-1], angle))


def judged(claim, runs, distinct, recorded, bound):
    """What a claim comes to, by the names of `claims.json`."""
    if claim["kind"] == "withdrawn":
        return {"value": None, "n": 0, "verdict": "withdrawn", "set_after": False}
    judge = Judge(claim, runs, distinct)
    if judge.lacks_runs():
        return {"value": None, "n": 0, "verdict": "no data", "set_after": False}
    if claim["kind"] == "estimators":
        found = judge.repeated(*estimators(runs, recorded))
    elif claim["kind"] == "rivals":
        found = judge.repeated(*rivals(runs, recorded))
    elif claim["kind"] in LOSSES and not judge.has_runs():
        return {"value": None, "n": 0, "verdict": "no data", "set_after": False, "runs": set()}
    elif claim["kind"] in ("count", "curves"):
        found = getattr(judge, claim["kind"])()
    else:
        found = judge.interval() if claim["kind"] in LOSSES else judge.figure()
    judge.equal()
    if claim.get("void"):
        found["verdict"] = "failed"
    runs = {run.name for run in judge.used}
    return found | judge.dates(bound) | {"gpu_sets": judge.gpu_sets(), "runs": runs}


def same(mine, theirs, scale):
    """Whether two entries agree: numbers to five digits, or five of `scale`."""
    if isinstance(mine, set):
        return mine == set(theirs)
    if isinstance(mine, datetime):
        return mine == datetime.fromisoformat(theirs)
    if isinstance(mine, (bool, str)) or mine is None or theirs is None:
        return mine == theirs
    return math.isclose(mine, theirs, rel_tol=1e-5, abs_tol=1e-5 * abs(scale))


def main(root):
    recorded, differ = root / "reports" / "recorded", 0
    declared = yaml.safe_load((root / "params" / "claims.yaml").read_text())
    distinct = yaml.safe_load((root / "params" / "datasets.yaml").read_text())
    bounds = json.loads((recorded / "bounds.json").read_text())
    told = {
        row["name"]: row for row in json.loads((recorded / "claims.json").read_text())["claims"]
    }
    runs = newest_runs(recorded)
    for name, claim in declared.items():
        limits = {re.sub(r"[^\d.]", "", bounds[name]["bound"])} if name in bounds else set()
        number = claim.get("at_least", claim.get("at_most", len(listed(claim["of"]))))
        assert limits == {f"{number:g}"}, (name, limits, number)
        bound = datetime.fromisoformat(bounds[name]["set"])
        found = judged(claim, runs, distinct, recorded, bound)
        scale = (claim["kind"] in LOSSES and found["value"]) or 0  # ends may lie near 0
        wrong = {
            key: (value, told[name][key])
            for key, value in found.items()
            if not same(value, told[name][key], scale)
        }
        differ += bool(wrong)
        print("DIFFERS" if wrong else "same   ", name, found["verdict"], wrong or found["value"])
    assert declared.keys() == told.keys(), declared.keys() ^ told.keys()
    print(f"{len(declared)} claims, {differ} differ")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])))
