"""The optimizers, a file each: what `optim.name` can be."""
