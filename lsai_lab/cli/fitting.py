"""`lsai techniques`, `longest`: what makes a run fit a GPU, and the longest sequence that fits."""

import json
from functools import partial

from tqdm import tqdm

from lsai_core.config.train import TrainConfig
from lsai_core.profiling.gpus import Gpu, find_gpu
from lsai_lab.cli import options as opt
from lsai_lab.cli.prediction import FORMATS
from lsai_lab.cli.tables import say, table
from lsai_lab.predictions.asked import Source, describe, gpu_called, sizes_that_exist


def techniques(
    study: opt.StudyOption = None,
    variant: opt.VariantOption = None,
    model: opt.ModelOption = None,
    hf: opt.HfOption = None,
    gpu: opt.GpuOption = None,
    gpus: opt.GpusOption = None,
    batch_size: opt.BatchOption = None,
    profile: opt.ProfileOption = None,
    set_: opt.SetOption = None,
) -> None:
    source = Source(study, variant, model, hf, profile=profile)
    task = source.run(
        find_gpu(gpu) if gpu else None, gpus, opt.overrides_from(set_, batch_size)
    ).config
    with sizes_that_exist(task):
        _show_techniques(task, gpu_called(gpu))


def longest(
    study: opt.StudyOption = None,
    variant: opt.VariantOption = None,
    model: opt.ModelOption = None,
    hf: opt.HfOption = None,
    gpu: opt.GpuOption = None,
    installed: opt.InstalledOption = None,
    gpus: opt.GpusOption = None,
    batch_size: opt.BatchOption = None,
    as_json: opt.JsonOption = False,
    profile: opt.ProfileOption = None,
    set_: opt.SetOption = None,
) -> None:
    source = Source(study, variant, model, hf, profile=profile)
    task = source.run(
        find_gpu(gpu) if gpu else None, gpus, opt.overrides_from(set_, batch_size)
    ).config
    with sizes_that_exist(task):
        _show_longest(task, gpu_called(gpu), as_json, installed)


def _show_techniques(task: TrainConfig, gpu: Gpu) -> None:
    from lsai_core.prediction.memory import verdict
    from lsai_lab.predictions import techniques as known_techniques
    from lsai_lab.predictions.will_fit import timed

    with tqdm(
        total=len(known_techniques.TECHNIQUES) + 1, unit="technique", leave=False, disable=None
    ) as bar:

        def on_next(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        rows = known_techniques.compare(task, gpu, on_next)
    found = [
        {
            "technique": row.name,
            "GPUs": row.config.parallel.world_size,
            "peak GiB": row.prediction.peak,
            "host GiB": row.prediction.host or None,
            "verdict": verdict(row.prediction, gpu),
            **timed(row.config, gpu),
        }
        for row in rows
    ]
    say(describe(task))
    print(f"\nOn {gpu.name} ({gpu.memory_gib:g} GiB):")
    print(table(found, ("rates",), formats=FORMATS))
    first = known_techniques.first_that_fits(rows, gpu)
    if first is None:
        say(
            "Nothing fits: take a shorter sequence, a smaller batch, a smaller model, or a larger "
            "GPU."
        )
    else:
        print(f"The first that fits: {first.name}, {first.prediction.peak:.1f} GiB.")
        if settings := known_techniques.settings_of(task, first):
            print("Its settings: " + " ".join(f"--set {pair}" for pair in settings))


def _show_longest(config: TrainConfig, gpu: Gpu, as_json: bool, installed: str | None) -> None:
    from lsai_lab.predictions.will_fit import expected_kernel, timed
    from lsai_lab.predictions.will_fit import longest as find_longest

    kernel_of = partial(expected_kernel, gpu=gpu, packages=installed)
    run, found, limited = find_longest(config, gpu, kernel_of)
    kernel, gpus, peak, host = kernel_of(run), run.parallel.world_size, found.peak, found.host
    time = timed(run, gpu, kernel)
    if as_json:
        print(
            json.dumps(
                {
                    "tokens": run.seq_len,
                    "limited_by_memory": limited,
                    "gpus": gpus,
                    "peak_gib": peak,
                    "host_gib": host,
                    "gpu": gpu.name,
                    "attention": kernel,
                    **time,
                },
                indent=1,
            )
        )
        return
    say(describe(run))
    print(
        f"\nThe longest sequence on {gpus} x {gpu.name} ({gpu.memory_gib:g} GiB): "
        f"{run.seq_len:,} tokens"
    )
    print(f"  predicted peak per GPU {peak:9.1f} GiB ({peak / gpu.memory_gib:.0%})")
    if kernel is not None:
        print(f"  attention kernel       {kernel:>9}, assumed")
    print(f"  host memory per GPU    {host:9.1f} GiB, in all {host * gpus:.1f} GiB")
    if time["step s"] is not None:
        print(f"  a step, estimated      {time['step s']:9.0f} s ({time['rates']})")
    if not limited:
        print(
            "Memory would take longer ones; positions beyond are not exact in the rotary "
            "embedding's fp32."
        )
