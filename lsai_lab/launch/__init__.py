"""Runs of several processes: started here or by srun, watched, and ended together.

launch  starts the workers of a run and turns their end into results or one error
watch   new rows of a run, stop signals, the end of processes
worker  one worker: `python -m lsai_lab.launch.worker <run folder> <data root>`
"""
