"""The one table of GPUs, `gpus.csv` beside this file, a line each, and how a name is found in it.

Memory is what torch reports of the whole device, in GiB; where no device was read, the size that
the driver shows. Bandwidths and peaks are those of the vendors' data sheets: dense, with fp32 sums.
`link_gb_per_s` is what a GPU sends to its neighbours in a node per second and direction: NVLink or
Infinity Fabric, else PCIe 3.0 (16), 4.0 (32) or 5.0 (64), all x16 but for the T4, L4 and A2.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lsai_core.base.errors import UserError
from lsai_core.base.tables import Part, as_html, as_text, value
from lsai_core.profiling.passport import Passport, read_passport

OUTSIDE_GIB = 0.6  # of a GPU's memory: the driver's context and the kernels' code
MARGIN = 0.03  # a share of a GPU's memory: predictions of reserved memory are that true
SMALL_GIB = 10.0  # below, their errors do not shrink: compilers' and kernels' own buffers


@dataclass(frozen=True)
class Tflops:
    """Dense peaks by dtype, in TFLOP/s; 0: no tensor cores for it, or no published figure."""

    bf16: float = 0.0
    fp8: float = 0.0
    tf32: float = 0.0
    fp32: float = 0.0


@dataclass(frozen=True, repr=False)
class Gpu:
    """One kind of GPU.

    `driver_name`: as the driver calls it; `drivers`: an expression for all of the driver's names,
    if there are several. `fp8`: whether its tensor cores take it. `capability`: CUDA's, empty for
    AMD and where it is not known. `tflops`: from the data sheet `sheet`. `also`: other names that
    people use. `passport`: what was measured on one, read from the file `passport_file`; with it
    the device may be a CPU.
    """

    name: str
    driver_name: str
    memory_gib: float
    memory_gb_per_s: float
    link_gb_per_s: float
    fp8: bool
    capability: str = ""
    tflops: Tflops = Tflops()
    sheet: str = ""
    drivers: str = ""
    also: tuple[str, ...] = ()
    passport: Passport | None = None
    passport_file: str = ""

    def __repr__(self) -> str:
        facts = (f"{head} {value(fact)}" for head, fact in zip(_HEADS, _facts(self), strict=True))
        return f"{self.name}: {', '.join(facts)}"

    @property
    def is_cpu(self) -> bool:
        """Whether it is no GPU, but a CPU that was measured."""
        return self.passport is not None and self.passport.device.kind == "cpu"

    @property
    def is_amd(self) -> bool:
        """Whether it is one of AMD, for which this package's kernels and fp8 are not written."""
        return self.driver_name.startswith("AMD ")

    @property
    def runs_our_fp8(self) -> bool:
        """Whether this package multiplies in fp8 there."""
        return self.fp8 and not self.is_amd

    @property
    def on(self) -> Literal["gpu", "cpu"]:
        """Where a step on it is predicted."""
        return "cpu" if self.is_cpu else "gpu"

    def is_called(self, driver_name: str) -> bool:
        """Whether the driver calls this kind of GPU so. Whole names: relatives have other peaks."""
        pattern = self.drivers or re.escape(self.driver_name)
        return bool(self.driver_name) and re.fullmatch(pattern, driver_name) is not None

    def peak(self, dtype: str) -> float:
        """Dense TFLOP/s of the data sheet in `dtype` ("bf16", ...); 0 where it states none."""
        return float(getattr(self.tflops, dtype, 0.0))


_HEADS = ("GiB", "GB/s", "link GB/s", "bf16 TFLOP/s", "fp8 TFLOP/s", "CUDA capability")


def _facts(gpu: Gpu) -> tuple[float | str | None, ...]:
    """What people ask of a GPU, by `_HEADS`; None where it is not known."""
    numbers = (gpu.memory_gib, gpu.memory_gb_per_s, gpu.link_gb_per_s)
    peaks = (gpu.tflops.bf16, gpu.tflops.fp8)
    return (*(number or None for number in (*numbers, *peaks)), gpu.capability or None)


class Gpus(tuple[Gpu, ...]):
    """GPUs, shown as a table."""

    def _parts(self) -> list[Part]:
        return [Part("", ("GPU", *_HEADS), [(gpu.name, *_facts(gpu)) for gpu in self])]

    def __repr__(self) -> str:
        return as_text(self._parts())

    def _repr_html_(self) -> str:
        return as_html(self._parts())


def _read(path: Path) -> Iterator[tuple[Gpu, bool]]:
    """The GPUs of a table, each with whether it is shown where nobody asked for one."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            tflops = {dtype: float(row[f"{dtype}_tflops"] or 0) for dtype in ALL_DTYPES}
            gpu = Gpu(
                row["name"],
                row["driver_name"],
                float(row["memory_gib"]),
                float(row["memory_gb_per_s"]),
                float(row["link_gb_per_s"]),
                fp8=row["fp8"] == "yes",
                capability=row["capability"],
                tflops=Tflops(**tflops),
                sheet=row["sheet"],
                drivers=row["drivers"],
                also=tuple(row["also"].split("; ")) if row["also"] else (),
            )
            yield gpu, row["shown"] == "yes"


ALL_DTYPES = ("bf16", "fp8", "tf32", "fp32")
_TABLE = list(_read(Path(__file__).with_name("gpus.csv")))
ALL_GPUS = Gpus(gpu for gpu, _ in _TABLE)
# What is answered for where no GPU is named, and what the report shows: from small to large.
GPUS = Gpus(gpu for gpu, shown in _TABLE if shown)

_UNITS = {"g": 2**30, "gib": 2**30, "gb": 10**9, "m": 2**20, "mib": 2**20, "mb": 10**6}  # bytes
_SIZE = re.compile(rf"([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\s*({'|'.join(_UNITS)})?")
_LARGEST = 100_000  # GiB; a size beyond it is no size
_SEVERAL = re.compile(r"\s*(\d+)\s*[x*]\s*([a-z].*)", re.IGNORECASE)
# A slice of a GPU, as the driver names it at the end: "NVIDIA A100-SXM4-80GB MIG 3g.40gb".
_SLICE = re.compile(r"(.*?)\s*(?:\bmig\b[\s-]*)?\b(\d)g\.(\d+)gb(?:\+\w+)?", re.IGNORECASE)
_EIGHTHS, _SEVENTHS = 8, 7  # of its memory and of its processors
_SLICE_SHARE = 0.97  # what a part of the memory is of its nominal size
_VENDORS = re.compile(r"\b(nvidia|amd|geforce|instinct|tesla|quadro|mig)\b")


def find_gpu(name: str | float) -> Gpu:
    """The GPU that `name` means: `h200`, `rtx4090`, `a100 80gb`, the driver's name, a MIG slice.

    A size means any GPU with so much memory: `24GiB` (or `24`) in units of 2**30 bytes, as the
    vendors' 24 GB are, `24GB` in units of 10**9; also `MiB` and `MB`. Its speed is not known, and
    fp8 is left out. UserError for an unknown name says what may have been meant, and for one that
    several share, which these are.
    """
    if isinstance(name, int | float) and not isinstance(name, bool):
        name = f"{name:g}GiB"
    if not isinstance(name, str):
        raise UserError(f'gpu is a name, such as "h100", or its memory in GiB, not {name!r:.80}')
    wanted = _plain(name)
    for gpu in ALL_GPUS:
        if wanted in _names(gpu) or gpu.is_called(name.strip()):
            return gpu
    if (gib := _size(name)) is not None:
        if not 0 < gib <= _LARGEST:
            raise UserError(f"unknown GPU {name!r}; its memory is a number of GiB: 24 or 24GiB")
        return Gpu(f"GPU with {gib:.4g} GiB", "", gib, 0, 0, False)
    if several := _SEVERAL.fullmatch(name):
        number, one = several.groups()
        raise UserError(f"GPU {name!r} means several; say --gpu {one.strip()!r} --gpus {number}")
    if part := _SLICE.fullmatch(name.strip()):
        return _slice(part[1], int(part[2]), int(part[3]), name)
    if wanted == "cpu":
        raise UserError("a CPU is known by its passport: `lsai probe` there, then --passport FILE")
    plain = {_plain(gpu.name): gpu.name for gpu in ALL_GPUS}
    sizes = [shown for known, shown in plain.items() if re.fullmatch(rf"{wanted}\d\d+", known)]
    if wanted and len(sizes) > 1:
        raise UserError(f"GPU {name!r} is {' or '.join(sizes)}; say which")
    close = [plain[known] for known in difflib.get_close_matches(wanted, plain)]
    hinted = (
        f"did you mean {' or '.join(close)}" if close else f"known: {', '.join(plain.values())}"
    )
    raise UserError(f"unknown GPU {name!r}; {hinted}, or its memory: 24GiB")


def passport_gpu(path: Path) -> Gpu:
    """The device whose passport the file `path` is. UserError for a file that is no passport."""
    return measured_gpu(read_passport(path), str(path))


def measured_gpu(passport: Passport, file: str) -> Gpu:
    """The device of a passport from `file`. Memory and peaks of a GPU that the table knows are the
    table's."""
    device = passport.device
    known = [gpu for gpu in ALL_GPUS if device.kind == "gpu" and gpu.is_called(device.name)]
    other = Gpu(
        device.name,
        device.name,
        device.memory_gib,
        passport.rates.copy_gb_per_s,
        0,
        fp8=passport.rates.fp8 is not None,
        capability=device.capability or "",
    )
    found = known[0] if known else other
    return replace(found, driver_name=device.name, passport=passport, passport_file=file)


def _size(name: str) -> float | None:
    """GiB of a size; None if `name` is none."""
    size = _SIZE.fullmatch(name.strip().lower())
    return float(size[1]) * _UNITS[size[2] or "gib"] / 2**30 if size else None


def _names(gpu: Gpu) -> set[str]:
    return {_plain(name) for name in (gpu.name, gpu.driver_name, *gpu.also)}


def _plain(name: str) -> str:
    """Lower case, without the vendor, spaces, marks and the unit of a size at the end."""
    words = _VENDORS.sub("", re.sub(r"[^a-z0-9]+", " ", name.lower()))
    return re.sub(r"(?<=\d)gi?b$", "", words.replace(" ", ""))


def _slice(whole: str, processors: int, gb: int, name: str) -> Gpu:
    """A MIG slice with so many sevenths of the processors of the GPU that `whole` names."""
    if not 1 <= processors <= _SEVENTHS or gb < 1:
        raise UserError(f"GPU {name!r}: a MIG slice has 1 to 7 parts and some memory")
    if not _plain(whole):
        return Gpu(f"MIG {processors}g.{gb}gb", "", _SLICE_SHARE * gb, 0, 0, False)
    gpu = find_gpu(whole)
    eighths = round(gb * _EIGHTHS / gpu.memory_gib)
    if not 1 <= eighths <= _EIGHTHS or not gpu.driver_name:
        raise UserError(f"GPU {name!r}: no slice of {gpu.name} ({gpu.memory_gib:g} GiB)")
    share = eighths / _EIGHTHS
    peaks = {dtype: peak * processors / _SEVENTHS for dtype, peak in vars(gpu.tflops).items()}
    return replace(
        gpu,
        name=f"{gpu.name} MIG {processors}g.{gb}gb",
        driver_name="",
        drivers="",
        also=(),
        memory_gib=round(gpu.memory_gib * share * (1 if share == 1 else _SLICE_SHARE), 1),
        memory_gb_per_s=gpu.memory_gb_per_s * share,
        tflops=Tflops(**peaks),
    )


def usable_gib(gpu: Gpu, margin: float = MARGIN) -> float:
    """What a run may need and surely fit; a share `margin` of the memory stays free."""
    return gpu.memory_gib - spare_gib(gpu.memory_gib, margin) - OUTSIDE_GIB


def spare_gib(memory_gib: float, margin: float = MARGIN) -> float:
    """What stays free of `memory_gib`: a share of it, and not less than that of `SMALL_GIB`."""
    return margin * max(memory_gib, SMALL_GIB)


def enough_gib(needed_gib: float, margin: float = MARGIN) -> float:
    """The smallest memory of which `needed_gib` are left, beside what stays free."""
    return max(needed_gib / (1 - margin), needed_gib + margin * SMALL_GIB)
