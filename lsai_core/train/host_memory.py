"""Keep freed host memory: on a CPU, activations are freed and allocated again in every step.

glibc gives large blocks straight back to the kernel and asks for them anew, and the kernel clears every page each time: on
two cores a quarter of a training step went into that. Told to keep what is freed, the process reuses it. Only speed changes:
the memory figures count live tensors, and the search for the largest batch does not use this.
"""

from __future__ import annotations

import ctypes

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc's allocator not to return memory to the kernel. False where there is no glibc (nothing changes then)."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))
    except (OSError, AttributeError):
        return False
