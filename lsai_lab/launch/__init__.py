"""Runs of several processes: started by torchrun or srun, watched, and ended together."""
