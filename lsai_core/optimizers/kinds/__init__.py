"""The optimizers, one file each: `OPTIMIZER` in it says how one is built and what it keeps. Found
by looking here."""
