"""Training over several processes: who they are, how they are started, how the model is sharded over them, its checkpoints.

world        what the training loop knows of the other processes (nothing, for one)
processes    a world of real processes, over NCCL or gloo
launch       starts the workers of a run and turns their end into results or one error
watch        what it watches meanwhile: new rows, silence, deaths, requests to stop
worker       one worker: `python -m lsai_core.parallel.worker <run folder> <data root>`
fsdp         the model, sharded (FSDP2)
sequence     processes that share each sequence (context parallelism)
checkpoint   distributed checkpoints, readable by another number of processes
export       the sharded model as one Hugging Face checkpoint
"""
