"""Data: from any source of text to token files that training reads.

source (stdlib, polish-docs, speakleash:<name>, file:<glob>)   sources.py and one file per source
  -> clean documents, split 85/10/5 by content                  documents.py
  -> byte-level BPE trained on the training split                tokenizer.py
  -> train.bin, validation.bin, test.bin (uint16) + meta.json    tokenizer.py, prepare.py, dataset.py
  -> batches, a pure function of (seed, step)                    batches.py
"""

from lsai_core.training.batches import BatchStream, sequential_batches
from lsai_lab.data.dataset import Dataset, Split, data_root, find_datasets
from lsai_lab.data.prepare import prepare

__all__ = ["BatchStream", "Dataset", "Split", "data_root", "find_datasets", "prepare", "sequential_batches"]
