"""Keep freed host memory: on a CPU, activations are freed and allocated again in every step.

glibc gives large blocks straight back to the kernel and asks for them anew, and the kernel clears
every page each time: on two cores a quarter of a training step went into that. Told to keep what is
freed, the process reuses it. Only speed changes: the memory figures count live tensors, and the
searches within an allocation limit tell it the opposite.
"""

import ctypes

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_NEVER = 2**31 - 1
_LARGE = 128 * 2**10  # bytes; where glibc begins


def keep_freed_memory() -> bool:
    """Tell glibc's allocator not to return memory to the kernel. False where there is no glibc
    (nothing changes then)."""
    return _set({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _NEVER})


def return_freed_memory() -> bool:
    """Tell it to return every large block at once, for a process whose allocations are limited.
    False as above. Left alone it learns from what is freed, and how many sequences fit a limit
    differed by a fifth from one process to the next."""
    return _set({_M_MMAP_THRESHOLD: _LARGE})


def _set(options: dict[int, int]) -> bool:
    try:
        libc = ctypes.CDLL("libc.so.6")
        return all(libc.mallopt(option, value) for option, value in options.items())
    except (OSError, AttributeError):
        return False
