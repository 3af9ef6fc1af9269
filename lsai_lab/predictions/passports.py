"""From what `lsai probe` measured (`lsai_lab/benches/probe.py`) to the passport of the machine, by
the way that records go to the tables that ship."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lsai_core.base.files import write_text
from lsai_core.config.strict import Strict, validated
from lsai_core.prediction.roofline import Speed, counted, estimate
from lsai_core.profiling.gpus import Gpu, measured_gpu
from lsai_core.profiling.passport import MOST_BYTES, AttentionRate, Costs, Passport
from lsai_lab.benches.attention.config import AttentionBenchConfig
from lsai_lab.benches.attention_table import rankings_of
from lsai_lab.benches.probe import STEPS, Found, step_config
from lsai_lab.predictions.rates import messages_of, rates_of, short


def passport_of(
    device: Found, found: Mapping[str, Found], *, day: str, seconds: float, disturbed: str | None
) -> Passport:
    """The passport of `device` (`device_facts`) by what the parts of the probe, by name, `found`:
    the ceilings at least, else ValueError."""
    if "ceilings" not in found:
        raise ValueError("without the part `ceilings` there are no rates")
    ceilings = found["ceilings"]
    rates = rates_of(found.get("products", {}).get("rows", []), ceilings)
    if "d2h_gb_per_s" in ceilings:
        rates["d2h_gb_per_s"] = short(ceilings["d2h_gb_per_s"])
    power = {name: short(value) for name, value in found.get("power", {}).items()}
    data = {
        "measured": day,
        "seconds": short(seconds),
        "disturbed": None if disturbed is None else _plain(disturbed),
        "device": _plain(device),
        "rates": rates,
        "power": power,
        "messages": messages_of(found.get("messages", {}).get("rows", []), device["count"]),
        "attention": [row for part in found.values() for row in _attention(part)],
    }
    passport = validated(Passport, data, "the probe")
    costs = _costs(measured_gpu(passport, ""), found)
    return passport.model_copy(update={"costs": costs})


def _plain(value: Any) -> Any:
    """Words without what a passport's may not have."""
    if isinstance(value, str):
        return re.sub(r"[^A-Za-z0-9 .,:;/()+@*#_-]+", " ", value)[:100].strip()
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _attention(part: Found) -> list[Found]:
    """The rates of a part that is an attention run."""
    if "config" not in part:
        return []
    config = validated(AttentionBenchConfig, part["config"], "the probe's attention")
    rankings = rankings_of(config, part["rows"], part["results"])
    names = AttentionRate.model_fields
    return [{n: v for n, v in asdict(row).items() if n in names} for row in rankings]


def _costs(gpu: Gpu, parts: Mapping[str, Found]) -> Costs:
    """The costs that parts with steps of small models tell: on a GPU the host takes their whole
    time, on a CPU what products, attention and the costs before it leave of it."""
    found = Costs()
    for name, settings in STEPS["cpu" if gpu.is_cpu else "cuda"].items():
        step = parts.get(f"step-{name}")
        if step is None or gpu.passport is None:
            continue
        config, kernel = step_config(settings), step["attention"]
        gpu = measured_gpu(gpu.passport.model_copy(update={"costs": found}), "")
        speed, number = Speed(gpu), counted(config, kernel, gpu.on)[1][name]
        unit_s = number / (speed.copy if name == "eager" else 1.0)
        left_s = step["step_s"]
        if gpu.is_cpu and (time := estimate(config, gpu, kernel)) is not None:
            left_s -= time.step_s - speed.costs[name] * unit_s
        if unit_s and left_s > 0:
            cost = float(f"{left_s / unit_s:.3g}")
            found = found.model_copy(update={name: cost})
    return found


def passport_text(passport: Passport) -> str:
    """The text of its file: a line for each fact, and for each row of attention and messages."""
    lines = []
    for name in Passport.model_fields:
        value = getattr(passport, name)
        if isinstance(value, list):
            inner = [_json(row.model_dump(exclude_defaults=True)) for row in value]
            text = f"[\n  {_rows(inner)}\n ]" if inner else "[]"
        elif isinstance(value, Strict):
            facts = value.model_dump(exclude_defaults=True)
            inner = [f'"{key}": {_json(one)}' for key, one in facts.items()]
            text = f"{{\n  {_rows(inner)}\n }}" if inner else "{}"
        else:
            text = _json(value)
        lines.append(f'"{name}": {text}')
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _rows(lines: Sequence[str]) -> str:
    return ",\n  ".join(lines)


def write_passport(path: Path, passport: Passport) -> None:
    """Write it, with as many rows of attention as leave the file small enough to be read."""
    while len(text := passport_text(passport)) > MOST_BYTES and passport.attention:
        passport = passport.model_copy(update={"attention": passport.attention[:-1]})
    write_text(path, text)
