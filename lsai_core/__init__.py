"""lsai_core: model, attention, kernels, fp8, context parallelism, FSDP2, training and profiling, usable alone."""

__version__ = "0.1.0"
