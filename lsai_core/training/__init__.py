"""Training one model: the loop, its precision, its checkpoints and its metrics."""
