"""Training one model on one machine: the loop, its precision, its checkpoints and its metrics."""
