"""The chapter on attention kernels."""
