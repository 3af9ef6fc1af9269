"""Which GPUs CUDA gives a process, in CUDA's order: the driver itself is asked, by a process of its
own, because one that has touched CUDA holds memory there and cannot fork workers that use it.

NVML counts GPUs along the bus. CUDA begins with the fastest unless CUDA_DEVICE_ORDER says
otherwise, CUDA_VISIBLE_DEVICES chooses among them, and a GPU that is cut up (MIG) counts as one of
its slices.
"""

import ctypes
import functools
import json
import os
import subprocess
import sys
import uuid
from dataclasses import dataclass

_LIBRARIES = {"linux": "libcuda.so.1", "win32": "nvcuda.dll"}
_DECIDE = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_LONGEST_S = 120.0  # a driver that is loaded for the first time takes some seconds a GPU


@dataclass(frozen=True)
class CudaDevice:
    """`uuid` as 36 characters without a prefix (of a slice its own); `memory`: bytes."""

    uuid: str
    name: str
    memory: int


def cuda_devices() -> tuple[CudaDevice, ...]:
    """The GPUs of this process in CUDA's order; none where the driver cannot be asked."""
    return _asked(*(os.environ.get(name) for name in _DECIDE))


@functools.cache
def _asked(*_: str | None) -> tuple[CudaDevice, ...]:
    command = [sys.executable, "-I", __file__]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S)
        return tuple(CudaDevice(*row) for row in json.loads(told.stdout))
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError):
        return ()


def _ask() -> list[tuple[str, str, int]]:
    """uuid, name and bytes of each device, by the driver's own functions; CUDA is in use after
    it."""
    cuda = ctypes.CDLL(_LIBRARIES[sys.platform])

    def call(function: str, *arguments: object) -> None:
        if code := getattr(cuda, function)(*arguments):
            raise OSError(f"{function} answers {code}")

    count, found = ctypes.c_int(), []
    call("cuInit", 0)
    call("cuDeviceGetCount", ctypes.byref(count))
    for number in range(count.value):
        device, size = ctypes.c_int(), ctypes.c_size_t()
        name, identity = ctypes.create_string_buffer(256), (ctypes.c_char * 16)()
        call("cuDeviceGet", ctypes.byref(device), number)
        call("cuDeviceGetName", name, len(name), device)
        call("cuDeviceGetUuid_v2", ctypes.byref(identity), device)
        call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        found.append((str(uuid.UUID(bytes=identity.raw)), name.value.decode(), size.value))
    return found


if __name__ == "__main__":
    print(json.dumps(_ask()))
