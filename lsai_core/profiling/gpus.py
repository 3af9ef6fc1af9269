"""The one table of GPUs: memory, bandwidths, peaks, architecture, and how a name is found in it.

Memory is what torch reports of the whole device, in GiB; where no device was read, the size that
the driver shows. Bandwidths and peaks are those of the vendors' data sheets: dense, with fp32 sums.
`link_gb_per_s` is what a GPU sends to its neighbours in a node per second and direction: NVLink or
Infinity Fabric, else PCIe 3.0 (16), 4.0 (32) or 5.0 (64), all x16 but for the T4, L4 and A2.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from lsai_core.base.errors import UserError


@dataclass(frozen=True)
class Tflops:
    """Dense peaks by dtype, in TFLOP/s; 0: no tensor cores for it, or no published figure."""

    bf16: float = 0.0
    fp8: float = 0.0
    tf32: float = 0.0
    fp32: float = 0.0


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    `driver_name`: as the driver calls it; `drivers`: an expression for all of the driver's names,
    if there are several. `fp8`: whether its tensor cores take it. `capability`: CUDA's, empty for
    AMD and where it is not known. `tflops`: from the data sheet `sheet`. `also`: other names that
    people use.
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

    def is_called(self, driver_name: str) -> bool:
        """Whether the driver calls this kind of GPU so. Whole names: relatives have other peaks."""
        pattern = self.drivers or re.escape(self.driver_name)
        return bool(self.driver_name) and re.fullmatch(pattern, driver_name) is not None

    def peak(self, dtype: str) -> float:
        """Dense TFLOP/s of the data sheet in `dtype` ("bf16", ...); 0 where it states none."""
        return float(getattr(self.tflops, dtype, 0.0))


_HOPPER_SXM = Tflops(bf16=989.5, fp8=1979.0, tf32=494.7, fp32=67.0)
_AMPERE = Tflops(bf16=312.0, tf32=156.0, fp32=19.5)
_H100, _H200, _GH200 = "NVIDIA H100 data sheet", "NVIDIA H200 data sheet", "NVIDIA GH200 data sheet"
_ADA = "NVIDIA Ada architecture white paper (fp32 accumulation)"
_GA102 = "NVIDIA Ampere GA102 architecture white paper (fp32 accumulation)"
_RTX_BLACKWELL = "NVIDIA RTX Blackwell architecture white paper (fp32 accumulation)"
_BLACKWELL = "NVIDIA Blackwell data sheet"

# What is answered for where no GPU is named, and what the report shows: from small to large.
GPUS: tuple[Gpu, ...] = (
    Gpu(
        "RTX 4090",
        "NVIDIA GeForce RTX 4090",
        23.5,
        1008,
        32,
        True,
        "8.9",
        Tflops(bf16=165.2, fp8=330.3, tf32=82.6, fp32=82.6),
        _ADA,
        also=("4090", "RTX 4090-24"),
    ),
    Gpu(
        "RTX 5090",
        "NVIDIA GeForce RTX 5090",
        31.4,
        1792,
        64,
        True,
        "12.0",
        Tflops(bf16=209.5, fp8=419.0, tf32=104.8, fp32=104.8),
        _RTX_BLACKWELL,
        also=("5090", "RTX 5090-32"),
    ),
    Gpu(
        "A100-40",
        "A100-SXM4-40GB",
        39.4,
        1555,
        300,
        False,
        "8.0",
        _AMPERE,
        "NVIDIA A100 data sheet",
        r"(NVIDIA )?A100[- ](SXM4|PCIE|PCIe)-40GB",
        ("A100 PCIe 40GB", "A100 SXM 40GB"),
    ),
    Gpu(
        "A100-80",
        "A100-SXM4-80GB",
        79.1,
        2039,
        300,
        False,
        "8.0",
        _AMPERE,
        "NVIDIA A100 data sheet",
        r"(NVIDIA )?A100[- ]((SXM4|PCIE|PCIe)-80GB|80GB PCIe|SXM4|PCIE|PCIe)",
        ("A100 80GB PCIe", "A100 PCIe 80GB", "A100 SXM 80GB"),
    ),
    Gpu(
        "H100",
        "NVIDIA H100 80GB HBM3",
        79.1,
        3350,
        450,
        True,
        "9.0",
        _HOPPER_SXM,
        f"{_H100} (SXM)",
        r"NVIDIA H100 80GB HBM3|NVIDIA H100 SXM\w*",
        ("H100-80", "H100 SXM", "H100 SXM5", "H100 SXM5 80GB", "H100 SXM 80GB"),
    ),
    Gpu(
        "GH200-96",
        "NVIDIA GH200 120GB",
        94.5,
        4000,
        450,
        True,
        "9.0",
        _HOPPER_SXM,
        _GH200,
        r"NVIDIA GH200\b(?! 144)(?!.*MIG).*",
        ("GH200 120GB", "GH200 480GB", "GH200 HBM3"),
    ),
    Gpu(
        "H200",
        "NVIDIA H200",
        139.8,
        4800,
        450,
        True,
        "9.0",
        _HOPPER_SXM,
        f"{_H200} (SXM)",
        also=("H200 SXM", "H200-141", "H200 SXM 141GB"),
    ),
    Gpu(
        "GH200-144",
        "NVIDIA GH200 144G HBM3e",
        140.0,
        4900,
        450,
        True,
        "9.0",
        _HOPPER_SXM,
        _GH200,
        r"NVIDIA GH200 144G\b.*",
        ("GH200 HBM3e",),
    ),
)

# The others, by architecture. V100 and T4 have no bf16: a step in it has no peak there. H100 NVL,
# H200 NVL and H20 have none either: what is published of them is with sparsity, or second hand.
_OTHERS: tuple[Gpu, ...] = (
    Gpu(
        "V100-16",
        "Tesla V100-SXM2-16GB",
        15.8,
        900,
        150,
        False,
        "7.0",
        Tflops(fp32=15.7),
        "NVIDIA V100 data sheet",
        r"Tesla V100-(SXM2|PCIE)-16GB",
    ),
    Gpu(
        "V100-32",
        "Tesla V100-SXM2-32GB",
        31.7,
        900,
        150,
        False,
        "7.0",
        Tflops(fp32=15.7),
        "NVIDIA V100 data sheet",
        r"Tesla V100-(SXM2|SXM3|PCIE)-32GB",
    ),
    Gpu(
        "T4",
        "Tesla T4",
        14.6,
        320,
        16,
        False,
        "7.5",
        Tflops(fp32=8.1),
        "NVIDIA T4 data sheet",
        also=("T4-16",),
    ),
    Gpu(
        "RTX 2080 Ti",
        "NVIDIA GeForce RTX 2080 Ti",
        10.7,
        616,
        16,
        False,
        "7.5",
        Tflops(fp32=13.4),
        "NVIDIA Turing architecture white paper",
        also=("2080 Ti",),
    ),
    Gpu(
        "A10",
        "NVIDIA A10",
        22.1,
        600,
        32,
        False,
        "8.6",
        Tflops(bf16=125, tf32=62.5, fp32=31.2),
        "NVIDIA A10 data sheet",
        also=("A10-24",),
    ),
    Gpu(
        "A10G",
        "NVIDIA A10G",
        22.1,
        600,
        32,
        False,
        "8.6",
        Tflops(bf16=70, tf32=35, fp32=31.5),
        "NVIDIA A10G data sheet",
        also=("A10G-24",),
    ),
    Gpu(
        "A30",
        "NVIDIA A30",
        23.5,
        933,
        100,
        False,
        "8.0",
        Tflops(bf16=165, tf32=82, fp32=10.3),
        "NVIDIA A30 data sheet",
        also=("A30-24",),
    ),
    Gpu(
        "A40",
        "NVIDIA A40",
        44.4,
        696,
        56,
        False,
        "8.6",
        Tflops(bf16=149.7, tf32=74.8, fp32=37.4),
        "NVIDIA A40 data sheet",
        also=("A40-48",),
    ),
    Gpu(
        "RTX A4000",
        "NVIDIA RTX A4000",
        15.7,
        448,
        32,
        False,
        "8.6",
        Tflops(bf16=76.7, tf32=38.3, fp32=19.2),
        "NVIDIA RTX A4000 data sheet",
        also=("A4000",),
    ),
    Gpu(
        "RTX A5000",
        "NVIDIA RTX A5000",
        23.7,
        768,
        56,
        False,
        "8.6",
        Tflops(bf16=111.1, tf32=55.6, fp32=27.8),
        "NVIDIA RTX A5000 data sheet",
        also=("A5000",),
    ),
    Gpu(
        "RTX A6000",
        "NVIDIA RTX A6000",
        47.4,
        768,
        56,
        False,
        "8.6",
        Tflops(bf16=154.8, tf32=77.4, fp32=38.7),
        "NVIDIA RTX A6000 data sheet",
        also=("A6000", "A6000-48", "RTX A6000-48"),
    ),
    Gpu(
        "RTX 3060",
        "NVIDIA GeForce RTX 3060",
        11.6,
        360,
        32,
        False,
        "8.6",
        Tflops(bf16=25.5, tf32=12.7, fp32=12.7),
        _GA102,
        also=("3060", "RTX 3060-12"),
    ),
    Gpu(
        "RTX 3080",
        "NVIDIA GeForce RTX 3080",
        9.7,
        760,
        32,
        False,
        "8.6",
        Tflops(bf16=59.5, tf32=29.8, fp32=29.8),
        _GA102,
        also=("3080", "RTX 3080-10"),
    ),
    Gpu(
        "RTX 3090",
        "NVIDIA GeForce RTX 3090",
        23.6,
        936,
        32,
        False,
        "8.6",
        Tflops(bf16=71, tf32=35.6, fp32=35.6),
        _GA102,
        also=("3090", "RTX 3090-24"),
    ),
    Gpu(
        "RTX 3090 Ti",
        "NVIDIA GeForce RTX 3090 Ti",
        23.6,
        1008,
        32,
        False,
        "8.6",
        Tflops(bf16=80, tf32=40, fp32=40),
        _GA102,
        also=("3090 Ti",),
    ),
    Gpu(
        "A800",
        "NVIDIA A800-SXM4-80GB",
        79.1,
        2039,
        200,
        False,
        "8.0",
        _AMPERE,
        "NVIDIA A100 data sheet",
        r"NVIDIA A800[- ](SXM4-80GB|80GB PCIe)",
        ("A800-80",),
    ),
    Gpu(
        "L4",
        "NVIDIA L4",
        22.0,
        300,
        32,
        True,
        "8.9",
        Tflops(bf16=121, fp8=242.5, tf32=60, fp32=30.3),
        "NVIDIA L4 data sheet",
        also=("L4-24",),
    ),
    Gpu(
        "L40",
        "NVIDIA L40",
        44.4,
        864,
        32,
        True,
        "8.9",
        Tflops(bf16=181, fp8=362, tf32=90.5, fp32=90.5),
        "NVIDIA L40 data sheet",
        also=("L40-48",),
    ),
    Gpu(
        "L40S",
        "NVIDIA L40S",
        44.4,
        864,
        32,
        True,
        "8.9",
        Tflops(bf16=362, fp8=733, tf32=183, fp32=91.6),
        "NVIDIA L40S data sheet",
        also=("L40S-48",),
    ),
    Gpu(
        "RTX 4080",
        "NVIDIA GeForce RTX 4080",
        15.7,
        717,
        32,
        True,
        "8.9",
        Tflops(bf16=97.5, fp8=194.9, tf32=48.7, fp32=48.7),
        _ADA,
        also=("4080", "RTX 4080-16"),
    ),
    Gpu(
        "RTX 6000 Ada",
        "NVIDIA RTX 6000 Ada Generation",
        47.4,
        960,
        32,
        True,
        "8.9",
        Tflops(bf16=364.2, fp8=728.5, tf32=182.1, fp32=91.1),
        "NVIDIA RTX 6000 Ada data sheet",
        also=("6000 Ada",),
    ),
    Gpu(
        "H100 PCIe",
        "NVIDIA H100 PCIe",
        79.1,
        2039,
        64,
        True,
        "9.0",
        Tflops(bf16=756.5, fp8=1513.0, tf32=378.0, fp32=51.0),
        f"{_H100} (PCIe)",
        also=("H100 PCIe 80GB", "H100 80GB PCIe"),
    ),
    Gpu(
        "H100 NVL",
        "NVIDIA H100 NVL",
        93.1,
        3938,
        300,
        True,
        "9.0",
        also=("H100-94", "H100 NVL 94GB"),
    ),
    Gpu(
        "H800",
        "NVIDIA H800",
        79.1,
        3350,
        200,
        True,
        "9.0",
        _HOPPER_SXM,
        f"{_H100} (SXM)",
        also=("H800-80", "H800 SXM"),
    ),
    Gpu("H20", "NVIDIA H20", 95.0, 4000, 450, True, "9.0", also=("H20-96",)),
    Gpu("H200 NVL", "NVIDIA H200 NVL", 139.8, 4800, 450, True, "9.0"),
    Gpu(
        "B200",
        "NVIDIA B200",
        178.4,
        8000,
        900,
        True,
        "10.0",
        Tflops(bf16=2250, fp8=4500, tf32=1100, fp32=75),
        _BLACKWELL,
        also=("B200-180", "B200-192", "HGX B200", "DGX B200", "B200 SXM"),
    ),
    Gpu(
        "GB200",
        "NVIDIA GB200",
        184.3,
        8000,
        900,
        True,
        "10.0",
        Tflops(bf16=2500, fp8=5000, tf32=1250, fp32=80),
        _BLACKWELL,
        also=("GB200-186", "GB200-192", "GB200 NVL72"),
    ),
    Gpu(
        "B300",
        "NVIDIA B300 SXM6 AC",
        267.6,
        8000,
        900,
        True,
        "10.3",
        Tflops(bf16=2250, fp8=4500, fp32=75),
        _BLACKWELL,
        also=("B300-288",),
    ),
    Gpu(
        "GB300",
        "NVIDIA GB300",
        276.0,
        8000,
        900,
        True,
        "10.3",
        Tflops(bf16=2500, fp8=5000, fp32=80),
        _BLACKWELL,
        also=("GB300-288", "GB300 NVL72"),
    ),
    Gpu(
        "RTX 5080",
        "NVIDIA GeForce RTX 5080",
        15.5,
        960,
        64,
        True,
        "12.0",
        Tflops(bf16=112.6, fp8=225.1, tf32=56.3, fp32=56.3),
        _RTX_BLACKWELL,
        also=("5080", "RTX 5080-16"),
    ),
    Gpu(
        "RTX PRO 6000",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        94.9,
        1792,
        64,
        True,
        "12.0",
        Tflops(bf16=503.8, fp8=1007.6, fp32=126),
        "NVIDIA RTX PRO 6000 data sheet",
        r"NVIDIA RTX PRO 6000 Blackwell \w+ Edition",
        ("RTX PRO 6000 Blackwell",),
    ),
    Gpu(
        "MI210",
        "AMD Instinct MI210",
        63.9,
        1638,
        150,
        False,
        "",
        Tflops(bf16=181, fp32=45.3),
        "AMD Instinct MI210 data sheet",
    ),
    Gpu(
        "MI250X",
        "AMD Instinct MI250X",
        63.9,
        1638,
        200,
        False,
        "",
        Tflops(bf16=191.5, fp32=47.9),
        "AMD Instinct MI250X data sheet, one of its two dies",
        also=("MI250",),
    ),
    Gpu(
        "MI300X",
        "AMD Instinct MI300X",
        191.6,
        5300,
        448,
        True,
        "",
        Tflops(bf16=1307.4, fp8=2614.9, tf32=653.7, fp32=163.4),
        "AMD Instinct MI300X data sheet",
        also=("MI300X-192",),
    ),
    Gpu(
        "MI325X",
        "AMD Instinct MI325X",
        255.6,
        6000,
        448,
        True,
        "",
        Tflops(bf16=1307.4, fp8=2614.9, tf32=653.7, fp32=163.4),
        "AMD Instinct MI325X data sheet",
        also=("MI325X-256",),
    ),
    Gpu(
        "MI355X",
        "AMD Instinct MI355X",
        287.6,
        8000,
        538,
        True,
        "",
        Tflops(bf16=2500, fp8=5000, fp32=157.3),
        "AMD Instinct MI355X data sheet",
        also=("MI355X-288",),
    ),
)
ALL_GPUS: tuple[Gpu, ...] = GPUS + _OTHERS

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(g|gb|gib|m|mb|mib)?")
_LARGEST = 100_000  # GiB; a size beyond it is no size
_SEVERAL = re.compile(r"\s*(\d+)\s*[x*]\s*([a-z].*)", re.IGNORECASE)
# A slice of a GPU, as the driver names it at the end: "NVIDIA A100-SXM4-80GB MIG 3g.40gb".
_SLICE = re.compile(r"(.*?)\s*(?:\bmig\b[\s-]*)?\b(\d)g\.(\d+)gb(?:\+\w+)?", re.IGNORECASE)
_EIGHTHS, _SEVENTHS = 8, 7  # of its memory and of its processors
_SLICE_SHARE = 0.97  # what a part of the memory is of its nominal size
_VENDORS = re.compile(r"\b(nvidia|amd|geforce|instinct|tesla|quadro|mig)\b")


def find_gpu(name: str) -> Gpu:
    """The GPU that `name` means: `h200`, `rtx4090`, `a100 80gb`, the driver's name, a MIG slice.

    A size (`24`, `24GB`, `24576MiB`) means any GPU with so much memory (GiB); its speed is not
    known, and fp8 is left out. UserError for an unknown name says what may have been meant, and
    for one that several share, which these are.
    """
    wanted = _plain(name)
    for gpu in ALL_GPUS:
        if wanted in _names(gpu) or gpu.is_called(name.strip()):
            return gpu
    size = _SIZE.fullmatch(name.strip().lower())
    if (
        size
        and 0
        < (gib := float(size[1]) / (1024 if (size[2] or "").startswith("m") else 1))
        <= _LARGEST
    ):
        return Gpu(f"GPU with {gib:g} GiB", "", gib, 0, 0, False)
    if several := _SEVERAL.fullmatch(name):
        number, one = several.groups()
        raise UserError(f"GPU {name!r} means several; say --gpu {one.strip()!r} --gpus {number}")
    if part := _SLICE.fullmatch(name.strip()):
        return _slice(part[1], int(part[2]), int(part[3]), name)
    plain = {_plain(gpu.name): gpu.name for gpu in ALL_GPUS}
    sizes = [shown for known, shown in plain.items() if re.fullmatch(rf"{wanted}\d\d+", known)]
    if wanted and len(sizes) > 1:
        raise UserError(f"GPU {name!r} is {' or '.join(sizes)}; say which")
    close = [plain[known] for known in difflib.get_close_matches(wanted, plain)]
    said = f"did you mean {' or '.join(close)}" if close else f"known: {', '.join(plain.values())}"
    raise UserError(f"unknown GPU {name!r}; {said}, or its memory: 24GB")


def _size(name: str) -> float:
    """GiB of a size; 0 if `name` is none."""
    size = _SIZE.fullmatch(name.strip().lower())
    if size is None:
        return 0.0
    return float(size[1]) / (1024 if (size[2] or "").startswith("m") else 1)


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
