"""What is measured, one file or folder each: a training run, attention kernels, shared sequences,
products, a machine."""
