"""The committed table of what fits which GPU (`tests/fits_table.py` writes it), which the report shows with filters."""

from lsai_lab.predicted import table_path

__all__ = ["TASK", "table_path"]

TASK = ["model", "seq_len", "batch_size"]
