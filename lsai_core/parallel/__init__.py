"""Training over several processes: who they are, how the model is sharded over them, its
checkpoints.

world        what the training loop knows of the other processes (nothing, for one)
processes    a world of real processes, over NCCL or gloo
fsdp         the model, sharded (FSDP2)
sequence     processes that share each sequence (context parallelism)
checkpoint   distributed checkpoints, readable by another number of processes
export       the sharded model as one Hugging Face checkpoint
"""
