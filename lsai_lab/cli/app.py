"""The commands of `lsai`, bound together; each group of them is one file here."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from lsai_lab.cli import cluster, data, runs
from lsai_lab.cli.attention_table import attention_table
from lsai_lab.cli.claims import claims
from lsai_lab.cli.doctor import doctor
from lsai_lab.cli.plot import plot
from lsai_lab.cli.predict import predict_command
from lsai_lab.cli.report import report


class Interrupted(Exception):
    """Ctrl-C in a command. A KeyboardInterrupt would be swallowed by Typer, which ends without a word."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run experiments on large-scale AI engineering and write the lab report, every number traceable to its run.",
)
app.command("doctor", help="What this machine can and cannot run, why, and how to fix it.")(doctor)
app.add_typer(data.app, name="data")
app.command(
    "train",
    help="Train one variant of a study with your own settings and show what came out.\n\nExamples:\n\n"
    "lsai train --technique flash_gradcp --batch-size 8 --dataset polish-docs\n\n"
    "8-bit AdamW: --set optim.states=8bit; all states in host memory, also on one GPU: --set parallel.cpu_offload=true\n\n"
    "FSDP2 over four GPUs or CPU processes: --set parallel.fsdp=4\n\n"
    "Four processes share each long sequence: --technique flash_gradcp --set parallel.cp=4 --set seq_len=65536; for still "
    "longer ones add --set saved_inputs=host --set blocks=fused --set mlp_chunk=8192",
)(runs.train)
app.command("find-batch", help="Find the largest batch of a variant that trains on this machine.")(runs.find_batch)
app.command(
    "predict",
    help="Predict peak memory and step time of a training run on any GPU, without one.\n\nExamples:\n\n"
    "Will it fit, and with which technique? lsai predict --model llama3-8b --gpu rtx4090 --techniques\n\n"
    "The longest sequence that memory allows, and the host memory it needs: lsai predict --model llama3-8b --gpu h200 "
    "--longest --set grad_checkpoint=full\n\n"
    "A study's run: lsai predict --study speed --variant attention",
)(predict_command)
app.command(
    "study",
    help="Run every variant of a study that is not recorded yet.\n\nThe studies are the files of params/studies; among them: "
    "memory, course, attention, speed, fp8, and for several GPUs\n\n"
    "lsai study ablation (the same loss), lsai study fsdp --parts weak (scaling), lsai study largest --parts train_layers",
)(runs.study)
app.command("compare", help="Compare the recorded runs of a study in a table.")(runs.compare)
app.command(
    "plot",
    help="Draw the plots of a plot configuration from the newest runs of its study.\n\nThe file lists plots: lines (a "
    "column of metrics.jsonl against step, tokens or time) and bars (a result of summary.json, with its spread over repeats), "
    "each with label, unit, smoothing, log scale and variants; params/plots/course.yaml explains the keys.",
    short_help="Draw the plots of a plot configuration.",
)(plot)
app.command("record", help="Copy finished runs into reports/recorded/, to be committed.")(runs.record)
app.command("submit", help="Submit a study to a Slurm cluster, and a report job after it.")(cluster.submit)
app.command("jobs", help="List the submitted jobs: state, elapsed time, outcome, log.")(cluster.jobs)
app.command("cancel", help="Cancel submitted jobs, with the report jobs that follow them.")(cluster.cancel)
app.command("claims", help="Recompute every headline statement from the records.")(claims)
app.command("attention-table", help="The table behind attention's auto, made from the records.")(attention_table)
app.command("report", help="Run the studies, execute the chapters and render the report.")(report)
