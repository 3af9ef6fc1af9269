"""Measuring: FLOPs and peaks, step times, memory per phase and traces.

flops        work per token by the stated convention, dense peaks, model FLOPs utilization
steptime     step durations without a host synchronization per step
memory       forward, backward and optimizer peaks (CUDA allocator statistics, or live tensor bytes
             on CPU)
trace        torch profiler trace, time per kernel class, CUDA memory snapshot
limits       the CPU cores and the memory that this process may use (affinity, cgroups)
"""
