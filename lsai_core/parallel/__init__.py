"""Training over several processes: who they are, and how they share the model.

world        what the training loop knows of the other processes (nothing, for one)
processes    a world of real processes, over NCCL or gloo
way          what a way of sharing the model declares
kinds/       the ways for processes that read batches of their own: ddp, zero1, zero2, fsdp
sequence     processes that share each sequence (context parallelism)
tensor       processes that share each matrix (tensor and sequence parallelism)
async_tensor the same, with messages hidden behind products
pipeline     processes that share the blocks
mesh         all processes, and what each dimension of their mesh shares
build        a process's part of the model
"""
