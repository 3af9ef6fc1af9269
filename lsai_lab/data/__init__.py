"""Data: from any source of text to clean documents split 85/10/5 by content (documents.py), a
byte-level BPE trained on the training split (tokenizer.py), and token files that training reads
(prepare.py, dataset.py)."""

from lsai_core.training.batches import BatchStream, sequential_batches
from lsai_lab.data.dataset import Dataset, Split, data_root, find_datasets
from lsai_lab.data.prepare import prepare

__all__ = [
    "BatchStream",
    "Dataset",
    "Split",
    "data_root",
    "find_datasets",
    "prepare",
    "sequential_batches",
]
