"""A passport in words: what it says of its machine, and what a pull request with it would add."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lsai_core.prediction.speeds import TABLE, measured
from lsai_core.profiling.gpus import ALL_DTYPES, ALL_GPUS
from lsai_core.profiling.passport import Passport, Rates, read_passport
from lsai_lab.machine.environment import device_label

FOLDER = Path("reports") / "passports"  # of committed passports, in the project


def figures(rates: Rates) -> dict[str, float]:
    """The rates by what they are, of products the largest."""
    copies = {
        "copies, GB/s": rates.copy_gb_per_s,
        "host to GPU, GB/s": rates.h2d_gb_per_s,
        "GPU to host, GB/s": rates.d2h_gb_per_s,
    }
    curves = {dtype: getattr(rates, dtype) for dtype in ALL_DTYPES}
    best = {
        f"products in {dtype}, TFLOP/s": max(rate for _, rate in curve)
        for dtype, curve in curves.items()
        if curve
    }
    return {name: value for name, value in copies.items() if value} | best


def lines(passport: Passport) -> Iterator[str]:
    """What it says of its machine."""
    device = passport.device
    yield f"{device.count} x {device.name} ({device.memory_gib:g} GiB), torch {device.torch}"
    told = figures(passport.rates)
    for row in passport.attention:
        if row.training and row.causal and row.length in (1024, 16_384):
            name, rate = next(iter(row.training.items()))
            heads = f"{'grouped ' if row.grouped else ''}heads of {row.head_dim}"
            window = f", window {row.window}" if row.window else ""
            told[f"attention, {heads}, {row.length} tokens{window}, {name}, TFLOP/s"] = rate
    for message in passport.messages:
        if message.bytes == 2**28:
            told[f"{message.operation} of 256 MiB, GB/s a GPU"] = message.bus_gb_per_s
    costs = {
        "host: an operator, us": passport.costs.call,
        "host: a compiled kernel, us": passport.costs.kernel,
    }
    told |= {name: 1e6 * value for name, value in costs.items() if value}
    power = {
        "power in products, W": passport.power.products_w,
        "power limit, W": passport.power.limit_w,
    }
    told |= {name: value for name, value in power.items() if value}
    width = max(map(len, told))
    for name, value in told.items():
        yield f"  {name:{width}} {_number(value):>9}"


def shared(path: Path) -> Iterator[str]:
    """What a pull request with the passport at `path` would add, and how its rates lie beside those
    that predictions take without it. UserError if it is no passport."""
    passport = read_passport(path)
    target = FOLDER / passport_name(passport)
    size = path.stat().st_size / 1e3
    yield f"A pull request would add one file of {size:.1f} kB, {target}:"
    yield f"  mkdir -p {FOLDER} && cp {shlex.quote(str(path))} {target} && git add {target}"
    device = passport.device
    if device.uuids:
        yield "It names the UUIDs of the GPUs (device.uuids), and nothing else of whose they are."
    kind = device.name
    for gpu in ALL_GPUS:
        kind = gpu.driver_name if gpu.is_called(device.name) else kind
    table = f"{TABLE.parent.parent.name}/{TABLE.parent.name}/{TABLE.name}"
    if kind not in measured()["rates"]:
        yield f"\n{table} has no rates of {device.name}. The passport's:"
        yield from (f"  {name}: {_number(v)}" for name, v in figures(passport.rates).items())
    else:
        yield f"\nBeside the rates of {kind} in {table}, which stay as they are:"
        yield from _compared(passport, Rates.model_validate(measured()["rates"][kind]))
    yield "\nNothing was sent."


def _compared(passport: Passport, known: Rates) -> Iterator[str]:
    ours, theirs = figures(passport.rates), figures(known)
    yield f"  {'':32} {'here':>9} {'table':>9}"
    for name, value in ours.items():
        there: Any = theirs.get(name)
        beside = f"{_number(there):>9} {value / there - 1:+8.1%}" if there else f"{'-':>9}"
        yield f"  {name:32} {_number(value):>9} {beside}"


def passport_name(passport: Passport) -> str:
    """The name of a committed passport's file: the machine's label, and how many GPUs it has."""
    device = passport.device
    gpu = device.name if device.kind == "gpu" else None
    label = device_label(gpu, device.host_cpu, device.host_cores)
    return label + (f"x{device.count}" if device.count > 1 else "") + ".json"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
