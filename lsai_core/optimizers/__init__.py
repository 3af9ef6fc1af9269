"""Optimizers: how a run builds one and clips, AdamW with its kernels, rounding and 8-bit states.
`kinds` holds a file each."""
