"""Reading a distributed checkpoint whose matrices have their rows in another order.

Processes that share each matrix keep the rows of query, key and value, and of gate and up, in the
order of their parts (`lsai_core.parallel.rows`), and save them so. A run of another number of such
processes asks for each of its rows where it lies: the weights and all that the optimizer keeps of
them.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lsai_core.config.model import ModelConfig
from lsai_core.optimizers.base import local
from lsai_core.parallel.rows import row_order

_PARAMETER = re.compile(r"blocks\.\d+\.\w+\.\w+\.weight")


class RowsInOrder(dcp.DefaultLoadPlanner):
    """Plans what a process reads: `saved` processes shared each matrix of a model of shape `config`
    when it was saved, `tp` do now."""

    def __init__(self, config: ModelConfig | None, saved: int, tp: int, **options: Any) -> None:
        super().__init__(**options)
        self._config, self._saved, self._tp = config, saved, tp

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        if self._saved == self._tp or self._config is None:
            return plan
        items: list[ReadItem] = []
        done: set[Any] = set()
        for item in plan.items:
            place = self._rows_of(item)
            if place is None:
                items.append(item)
            elif item.dest_index not in done:
                done.add(item.dest_index)
                items.extend(self._moved(item, place))
        return replace(plan, items=items)

    def _rows_of(self, item: ReadItem) -> Tensor | None:
        """The row in the checkpoint of each row of what `item` is a part of; None where they are
        the same."""
        assert self._config is not None
        found = _PARAMETER.search(item.dest_index.fqn)
        if found is None or len(item.lengths) != 2:
            return None
        own = row_order(self._config, self._tp, found[0])
        saved = row_order(self._config, self._saved, found[0])
        if own is None and saved is None:
            return None
        rows = saved if own is None else own
        assert rows is not None
        own = torch.arange(len(rows)) if own is None else own
        return own if saved is None else saved.argsort()[own]

    def _moved(self, item: ReadItem, place: Tensor) -> Iterator[ReadItem]:
        """Read items for all of the process's part that `item` belongs to, a run of rows that lie
        together at a time."""
        fqn, metadata = item.dest_index.fqn, self.metadata
        assert metadata is not None
        stored = metadata.state_dict_metadata[fqn]
        assert isinstance(stored, TensorStorageMetadata)
        first, column = item.dest_index.offset or (0, 0)
        rows, columns = local(self.state_dict[fqn]).shape
        own = place[first : first + rows]
        begins = [0, *(torch.nonzero(own.diff() != 1).flatten() + 1).tolist(), rows]
        for begin, end in itertools.pairwise(begins):
            offsets = torch.Size((int(own[begin]), column))
            chunk = ChunkStorageMetadata(offsets, torch.Size((end - begin, columns)))
            for part in create_read_items_for_chunk_list(fqn, stored, [chunk]):
                row, at = part.dest_offsets
                to = torch.Size((row + begin, at))
                yield replace(part, dest_index=item.dest_index, dest_offsets=to)
