"""The commands of `lsai`. Each is imported when it is called: `lsai --help` loads neither torch nor
pandas."""

import importlib
import re
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import lsai_core
from lsai_core.base.errors import UserError, did_you_mean

# Name: (module with the function of this name, or with an app of several; what it does; an
# example's arguments, and further paragraphs).
COMMANDS: dict[str, tuple[str, str, str]] = {
    "doctor": ("doctor", "What this machine can and cannot run, why, and how to fix it.", "--json"),
    "data": ("data", "Text for training: list, prepare, inspect.", "prepare stdlib --max-mb 5"),
    "train": (
        "runs",
        "Train one variant of a study with your own settings and show what came out.",
        "--technique flash_gradcp --batch-size 8 --dataset polish-docs\n\n"
        "8-bit AdamW: --set optim.states=8bit; bf16 weights rounded by chance, so that small "
        "updates are not lost: --set precision=bf16 --set "
        "optim.rounding=stochastic; all states in host memory, also on one GPU: --set "
        "parallel.cpu_offload=true"
        "\n\nFSDP2 over four GPUs or CPU processes: --set parallel.fsdp=4\n\n"
        "Four processes share each long sequence: --technique flash_gradcp --set parallel.cp=4 "
        "--set seq_len=65536; for "
        "still longer ones add --set saved_inputs=host --set blocks=fused --set mlp_chunk=8192",
    ),
    "find-batch": (
        "runs",
        "Find the largest batch of a variant that trains on this machine.",
        "--technique bf16",
    ),
    "predict": (
        "prediction",
        "Predict peak memory and step time of a training run on any GPU, without one.",
        "--model llama3-8b --gpu rtx4090\n\nA study's run: lsai predict --study speed "
        "--variant attention\n\nAnother trainer: "
        "lsai predict --config torchtitan.toml --gpus 8 --gpu h100; lsai predict --hf FOLDER --as "
        "hf --gpu 80GiB\n\nAny training script, run on a simulated GPU: lsai predict --script "
        "train.py --gpu a100 -- --batch-size 8"
        "\n\nThe largest batch: lsai predict --model llama3.2-1b --gpu 24GiB --largest-batch",
    ),
    "plan": (
        "plan",
        "What should I run? The fastest setting that fits a GPU, why, and as files for trainers.",
        "--model llama3-8b --tokens 131072 --gpu h100\n\nWithin a budget: lsai plan --model "
        "llama3.2-1b --tokens 65536 --seq-len 2048 --budget 20\n\nOver eight GPUs, for torchtitan: "
        "lsai plan --model llama3-8b --tokens 1048576 --seq-len 8192 --gpu h100 --gpus 8 "
        "--torchtitan plan.toml\n\nA study's run with something set: lsai plan --study speed "
        "--variant attention --gpu 'a100 80gb' --set optim.states=full\n\nTrain by it: "
        "lsai plan --model llama3.2-1b --tokens 65536 --gpu rtx4090 --write-yaml "
        "params/studies/mine.yaml; lsai train --study mine --technique planned\n\n"
        "Exit code: 0 found, 1 nothing fits (and what would), 2 the question was wrong.",
    ),
    "probe": (
        "probe",
        "Measure this machine in minutes: its passport, at whose rates predictions are made.",
        "--seconds 60\n\nThen: lsai predict --model llama3.2-1b --passport .cache/passport.json; "
        "lsai plan takes it, too\n\nWhat a pull request would add (nothing is sent): lsai probe "
        "--share\n\nWithout --seconds it takes about four minutes on a GPU and a minute and a half "
        "on a CPU, and never more than ten and two. Interrupted, it goes on where it was. A "
        "passport is used where it is named with --passport, and nowhere else.",
    ),
    "techniques": (
        "fitting",
        "Compare by prediction the techniques that save memory: which fits a GPU first? (minutes)",
        "--model llama3-8b --gpu rtx4090",
    ),
    "longest": (
        "fitting",
        "Predict the longest sequence that memory allows, and the host memory it needs.",
        "--model llama3-8b --gpu h200 --set grad_checkpoint=full",
    ),
    "study": (
        "runs",
        "Run every variant of a study that is not recorded yet.",
        "memory --only 'bf16,*_gradcp' --dry-run\n\n"
        "lsai study ablation (the same loss), lsai study fsdp --parts weak (scaling), lsai study "
        "largest --parts train_layers"
        "\n\nThe studies are the files of params/studies.",
    ),
    "sweep": (
        "sweep",
        "Run variants of a study under every combination of some settings.",
        "memory bf16,flash_attn --over seq_len=128,256,512\n\n"
        "lsai sweep memory bf16 --over optim.lr=1e-3,3e-3 --over batch_size=4,8 --dry-run",
    ),
    "runs": (
        "own",
        "Your own runs: list, filter, compare two, delete.",
        "list memory --where optim.lr=1e-3",
    ),
    "compare": (
        "runs",
        "Compare your runs of a study in a table; --recorded: the committed ones.",
        "memory --recorded --machine h200",
    ),
    "plot": (
        "plot",
        "Draw the comparison plots of a plot configuration: speed, memory, MFU, time, loss.",
        "course --recorded --out plots\n\nThe configurations are the files of params/plots.",
    ),
    "record": (
        "runs",
        "Copy finished runs into reports/recorded/, to be committed.",
        "memory --machine h200",
    ),
    "submit": (
        "cluster",
        "Submit a study to a Slurm cluster, and a report job after it.",
        "course --cluster slurm --per-variant --dry-run",
    ),
    "jobs": ("cluster", "List the submitted jobs: state, elapsed time, outcome, log.", "--json"),
    "cancel": ("cluster", "Cancel submitted jobs, with the report jobs that follow them.", "4711"),
    "claims": ("claims", "Recompute every headline statement from the records.", "--json"),
    "numbers": (
        "numbers",
        "Compare the numbers in the texts of chapters and README with what their cells compute.",
        "notebooks/25-time.ipynb\n\nlsai numbers --write (put the computed ones in)",
    ),
    "attention-table": (
        "claims",
        "The table behind attention's auto, made from the records.",
        "--write",
    ),
    "report": (
        "report",
        "Run the studies, execute the chapters and render the report.",
        "--only machine,memory\n\nlsai report --no-run --watch (while you write a chapter)",
    ),
    "new": ("new", "A laboratory in a folder of its own; a chapter of the report.", "lab mylab"),
}

ENVIRONMENT = """Environment variables:

LSAI_ROOT: the project's folder, with params/ and notebooks/ (default: here or above)

LSAI_RUNS, LSAI_DATA: records of runs; datasets and downloads (default: runs/, data/ in the project)

LSAI_MACHINE: name of this machine in the records (default: from its GPU or its number of cores)

LSAI_MEMORY_GIB: this machine's memory, where the system reports less than there is

LSAI_COMMIT: the commit that records name, where the project is no git checkout

LSAI_PROFILE: profile of notebooks, instead of the one detected

LSAI_STOP_GRACE_S: seconds that a stopped run has to save

LSAI_ACCOUNT: account for cluster jobs

LSAI_SPEAKLEASH_URL: another server for Speakleash's datasets"""


_NO_COMMAND = re.compile(r"No such command '([^']*)'")


def _commands(context: Any) -> list[str]:
    """The commands that may stand where a wrong one does."""
    group = getattr(context, "command", None)
    return list(getattr(group, "commands", None) or COMMANDS)


class Interrupted(Exception):
    """Ctrl-C in a command. A KeyboardInterrupt would be swallowed by Typer, which ends without a
    word."""


class _Commands(TyperGroup):
    """Imports a command when it is called; for a list of commands their one line each is enough.

    What Typer refuses (an unknown option, a wrong type) becomes a UserError, which is one line
    instead of a box.
    """

    _listing = False

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            code = super().main(*args, **options | {"standalone_mode": False, "prog_name": "lsai"})
        except typer.Abort:  # a question that nobody answered
            sys.exit("aborted")
        except Exception as error:
            # Typer's refusals have this; their base class is click's or Typer's own, by its
            # version.
            if not hasattr(error, "format_message"):
                raise
            context = getattr(error, "ctx", None)
            if type(error).__name__ == "NoArgsIsHelpError" and context is not None:
                print(context.get_help(), end="")
                sys.exit(2)
            place = context.command_path if context is not None else "lsai"
            said = error.format_message().rstrip(".")
            if unknown := _NO_COMMAND.match(said):
                near = did_you_mean(unknown[1], _commands(context))
                said = f"there is no command {unknown[1]!r}" + (f"; {near}" if near else "")
            more = f"`{place} --help` tells more"
            raise UserError(f"{said}{' ' if said.endswith('?') else '; '}{more}") from None
        sys.exit(code if isinstance(code, int) else 0)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        place, what, example = COMMANDS[cmd_name]
        if self._listing:
            return TyperCommand(cmd_name, help=what)
        module = importlib.import_module(f"lsai_lab.cli.{place}")
        told = f"{what}\n\nExamples:\n\nlsai {cmd_name} {example}"
        if hasattr(module, "app"):
            module.app.info.help = told
            return typer.main.get_group(module.app)
        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        one.command(cmd_name, help=told, short_help=what)(
            getattr(module, cmd_name.replace("-", "_"))
        )
        return typer.main.get_command(one)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        self._listing = True
        return super().shell_complete(ctx, incomplete)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Run experiments on large-scale AI engineering and write the lab report, every number "
    "traceable to its run.",
    epilog=ENVIRONMENT,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"lsai {lsai_core.__version__}")
        raise typer.Exit


_VersionOption = typer.Option(
    "--version", is_eager=True, callback=_show_version, help="Show the version."
)


@app.callback()
def _options(version: Annotated[bool, _VersionOption] = False) -> None:
    pass
