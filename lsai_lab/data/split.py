"""Splits: 85 % train, 10 % validation, 5 % test, by document, decided by each document's content.

A document's 64-bit key (a hash of the split seed and its text) is compared with two thresholds, so the decision needs
no state, and equal texts always land in the same split: no copy of a training document is ever tested on. For a corpus
of at least `SURVEY` distinct documents the thresholds are the fixed quantiles, so adding documents moves none of the
others. Documents cut from one of `MIN_FILES` or more files of plain text stay together; fewer files could not fill three
splits, so there each document is for itself. A smaller one would risk an empty split, so there the thresholds are taken from its sorted keys: the shares are
then exact to one document, and validation and test hold at least one each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lsai_core.errors import UserError
from lsai_lab.data.documents import Document

SPLITS = ("train", "validation", "test")
VALIDATION_SHARE, TEST_SHARE = 0.10, 0.05
SURVEY = 1000
MIN_FILES = 20  # the smallest split of so many files is one of them


class Splitter(NamedTuple):
    """Keys below `validation_from` are training documents (0), below `test_from` validation (1), the rest test (2)."""

    validation_from: int
    test_from: int

    def split(self, key: int) -> int:
        """Index into `SPLITS`."""
        return (key >= self.validation_from) + (key >= self.test_from)


def survey(documents: Iterable[Document], what: str) -> Splitter:
    """Read until `SURVEY` distinct documents are seen and choose the thresholds.

    Raises `UserError` (which names the corpus as `what`) for fewer than three distinct documents.
    """
    keys: set[int] = set()
    for document in documents:
        keys.add(document.key)
        if len(keys) == SURVEY:
            train = round(2**64 * (1 - VALIDATION_SHARE - TEST_SHARE))
            return Splitter(train, train + round(2**64 * VALIDATION_SHARE))
    if not keys:
        raise UserError(f"{what} holds no text (or its first document is larger than max_mb)")
    if len(keys) < 3:
        raise UserError(
            f"{what} holds only {len(keys)} distinct document(s); train, validation and test need at least one each"
        )
    ordered = sorted(keys)
    n_test = max(1, round(len(keys) * TEST_SHARE))
    n_validation = max(1, round(len(keys) * VALIDATION_SHARE))
    return Splitter(ordered[-n_test - n_validation], ordered[-n_test])
