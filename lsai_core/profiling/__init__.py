"""Measuring: FLOPs and peaks, measured ceilings, step times, memory per phase and traces.

flops        work per token by the stated convention, dense peaks, model FLOPs utilization
ceilings     what this machine's matmul, memory and links reach, measured in the same sitting
steptime     step durations without a host synchronization per step, and their summary
memory       forward, backward and optimizer peaks (CUDA allocator statistics, or live tensor bytes on CPU)
trace        torch profiler trace, time per kernel class, CUDA memory snapshot
limits       the CPU cores and the memory that this process may use (affinity, cgroups)
"""
