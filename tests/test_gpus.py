"""Names of GPUs: the ones that people use lead to the row of the table, and no other."""

from __future__ import annotations

import pytest

from lsai_core.base.errors import UserError
from lsai_core.prediction.roofline import estimate
from lsai_core.profiling.flops import theoretical_peak
from lsai_core.profiling.gpus import ALL_GPUS, GPUS, find_gpu

PEOPLE_SAY = {
    "b200": "B200",
    "HGX B200": "B200",
    "gb200": "GB200",
    "GB200 NVL72": "GB200",
    "L40S": "L40S",
    "l40s 48GB": "L40S",
    "NVIDIA A10G": "A10G",
    "a10g": "A10G",
    "a10": "A10",
    "A6000": "RTX A6000",
    "nvidia rtx a6000": "RTX A6000",
    "RTX 3090": "RTX 3090",
    "rtx3090": "RTX 3090",
    "3090": "RTX 3090",
    "geforce rtx-3090 ti": "RTX 3090 Ti",
    "GeForce RTX 4090": "RTX 4090",
    "4090": "RTX 4090",
    "t4": "T4",
    "Tesla T4": "T4",
    "MI300X": "MI300X",
    "AMD Instinct MI300X": "MI300X",
    "a100 80gb": "A100-80",
    "a100-80gb": "A100-80",
    "A100-SXM4-40GB": "A100-40",
    "A100 PCIe 40GB": "A100-40",
    "NVIDIA A100 80GB PCIe": "A100-80",
    "H100 SXM5 80GB": "H100",
    "h100 pcie": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "v100 32GB": "V100-32",
    "Tesla V100-SXM2-16GB": "V100-16",
    "NVIDIA GH200 480GB": "GH200-96",
    "H200 NVL": "H200 NVL",
    "RTX 6000 Ada": "RTX 6000 Ada",
}


@pytest.mark.parametrize("name", PEOPLE_SAY)
def test_gpus_are_found_by_the_names_that_people_use(name: str) -> None:
    for written in (name, name.upper(), name.lower(), f" {name} ", name.replace(" ", "_")):
        assert find_gpu(written).name == PEOPLE_SAY[name]


def test_no_name_leads_to_two_rows_and_every_peak_has_its_sheet() -> None:
    for gpu in ALL_GPUS:
        for name in (gpu.name, gpu.driver_name, *gpu.also):
            assert find_gpu(name) is gpu, name
        stated = {dtype: peak for dtype, peak in vars(gpu.tflops).items() if peak}
        assert bool(stated) == bool(gpu.sheet), gpu.name
        assert gpu.fp8 or "fp8" not in stated, gpu.name
        for dtype, tflops in stated.items():
            peak = theoretical_peak(gpu.driver_name, dtype)
            assert peak is not None and peak.tflops == tflops and gpu.sheet in peak.source
    assert set(GPUS) < set(ALL_GPUS)


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("24", 24.0),
        ("24GiB", 24.0),
        ("23.5gib", 23.5),
        ("24576MiB", 24.0),
        ("24 GB", 24e9 / 2**30),
        ("24000mb", 24e9 / 2**30),
    ],
)
def test_a_size_is_any_gpu_of_that_size(name: str, gib: float) -> None:
    found = find_gpu(name)
    assert found.memory_gib == gib and not found.peak("bf16") and not found.fp8


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 38.4),
        ("H100 1g.10gb", 9.6),
        ("h100 mig 7g.80gb", 79.1),
        ("A100-40 1g.5gb", 4.8),
        ("H200-1g.18gb", 17.0),
        ("MIG 2g.20gb", 19.4),
        ("A100-80 1g.20gb", 19.2),
    ],
)
def test_a_slice_has_its_share_of_memory_and_of_the_peaks(name: str, gib: float) -> None:
    found = find_gpu(name)
    assert found.memory_gib == pytest.approx(gib, abs=0.05)
    assert theoretical_peak(name, "bf16") is None, "the whole GPU's peak is not the slice's"
    if found.peak("bf16"):
        whole = find_gpu(name.split(" MIG")[0] if " MIG" in name else name[: name.rindex("g.") - 2])
        processors = int(name[name.rindex("g.") - 1])
        assert found.peak("bf16") == pytest.approx(whole.peak("bf16") * processors / 7)
        assert found.memory_gb_per_s <= whole.memory_gb_per_s


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a100", "is A100-40 or A100-80; say which"),
        ("gh200", "GH200-96 or GH200-144"),
        ("h10", "did you mean H100"),
        ("rtx 3070", "did you mean RTX 30"),
        ("8xH100", "--gpus 8"),
        ("8 x b200", "--gpus 8"),
        ("voodoo2", "known: RTX 4090"),
        ("", "known"),
        ("0GB", "known"),
        ("-24GB", "known"),
        ("9" * 30 + "GB", "known"),
        ("H100 3g.80gb.x", "unknown"),
        ("H100 9g.80gb", "1 to 7"),
        ("T4 1g.90gb", "no slice of T4"),
        ("24GiB 1g.5gb", "no slice"),
        ("[(*", "unknown"),
        ("h100\n\nb200", "unknown"),
        ("RTX 4090 D", "unknown"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "unknown"),
    ],
)
def test_what_is_no_gpu_of_the_table_is_one_line(name: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        find_gpu(name)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_step_is_timed_by_the_peaks_of_its_gpu() -> None:
    from conftest import tiny

    config = tiny(precision="bf16")
    times = {
        name: estimate(config, find_gpu(name)) for name in ("h100", "b200", "t4", "h100 1g.10gb")
    }
    assert times["t4"] is None, "it has no bf16"
    for name in ("h100", "b200", "h100 1g.10gb"):
        assert times[name] is not None
    assert times["b200"].products_s < times["h100"].products_s < times["h100 1g.10gb"].products_s
