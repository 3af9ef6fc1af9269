"""Intervals of Student's t for the mean of differences, seed by seed: of one setting, or of several
that are to be right together."""

import functools
import math

import pandas as pd

CONFIDENCE = 0.95


@functools.cache
def students_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """How far, in standard errors, a mean lies from the true one with this confidence, to either
    side: the quantile of Student's t for so many degrees of freedom, at least 1.

    By bisection of the distribution's closed form (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        within = _within(middle, degrees) < confidence
        low, high = (middle, high) if within else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _within(angle: float, degrees: int) -> float:
    """The share of Student's t between -t and t, where t = sqrt(degrees) tan(angle)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = cosine if odd else 1.0, 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def half_width(differences: pd.Series, settings: int = 1) -> float:
    """Half the 95 % interval of the mean of at least two differences; missing for fewer.

    `settings`: of how many settings this is one; all their intervals then hold together with 95 %
    (Bonferroni: each alone with 1 - 0.05 / settings).
    """
    n = int(differences.count())
    if n < 2:
        return float("nan")
    confidence = 1 - (1 - CONFIDENCE) / settings
    return float(students_t(n - 1, confidence) * differences.std() / n**0.5)
