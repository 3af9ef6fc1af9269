"""Runs of several processes: started by torchrun or srun, watched, and ended together.

launch  starts the workers of a run and turns their end into results or one error
watch   what it watches meanwhile: new rows, silence, deaths, requests to stop
worker  one worker: `python -m lsai_lab.launch.worker <run folder> <data root>`
"""
