"""lsai_core: how the lab runs. Model, kernels, data, training, profiling, records and the report's plumbing."""

__version__ = "0.1.0"
