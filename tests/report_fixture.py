"""Executed notebooks and run records as the report meets them: made in seconds, with every kind of output in them."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lsai_lab.runs.records import RunId, Summary, find_runs

KEYS = ("0a1b2c3d4e5f", "1a1b2c3d4e5f", "2a1b2c3d4e5f")

SUMMARY = """# Summary {#sec-summary}

This page answers the question: which technique makes training faster? See @tbl-headline, @fig-loss and @sec-memory.

- Polish: zażółć gęślą jaźń, ŻÓŁĆ.
- Maths: $\\text{MFU} = \\frac{\\text{FLOPs per token} \\times \\text{tokens/s}}{\\text{peak}}$
"""

SETUP = """import numpy as np, pandas as pd, matplotlib.pyplot as plt
from lsai_lab.report.show import run_link, show_figure, show_table, show_text
from lsai_lab.kit.style import apply_style, hatch_bars, series_style
apply_style()"""

HEADLINE = f"""df = pd.DataFrame({{
    "technique": ["baseline", "bf16", "selective | checkpointing", "too large"],
    "peak GiB": [12.3456, 8.1, 6.0221, None], "tokens/s": [10250, 20111, 18000, None], "loss": [3.21, 3.2145, 3.2139, None],
    "outcome": ["ok", "ok", "ok", "oom"], "key": {[*KEYS, KEYS[2]]!r}}})
show_table(df, "tbl-headline", "Peak memory falls from 12.3 to **6.0 GiB**; see @sec-memory.",
           formats={{"peak GiB": ".2f", "loss": "{{:.3f}}"}}, links={{"peak GiB": "key"}})
show_text(f"The best run was {{run_link('bf16', '{KEYS[1]}')}} (zażółć).")"""

FIGURES = """steps = np.arange(0, 200, 10)
fig, ax = plt.subplots()
for i, name in enumerate(["baseline", "bf16", "fp8"]):
    ax.plot(steps, 9 * np.exp(-steps / (60 + 10 * i)) + 3, label=name, **series_style(i))
ax.set(xlabel="step", ylabel="validation loss", title="Loss at equal tokens"); ax.legend()
show_figure(fig, "fig-loss", "Loss over 200 steps: the best ends at 3.21 ($\\\\pm 0.02$). See @tbl-headline.")
fig, axes = plt.subplots(1, 2, figsize=(6.3, 2.8))
pd.DataFrame({"forward": [1, 2, 3], "backward": [2, 4, 1]}, index=["a", "b", "c"]).plot.bar(ax=axes[0])
hatch_bars(axes[0]); axes[0].set_ylabel("GiB")
show_figure(fig, "fig-bars", "Forward and backward peak [GiB].")"""

MEMORY = """# Memory {#sec-memory}

## Definitions

The relative error is ||out - ref|| / ||ref||:

$$ \\varepsilon = \\frac{\\lVert O - O_{\\mathrm{ref}} \\rVert}{\\lVert O_{\\mathrm{ref}} \\rVert},
\\qquad O = \\mathrm{softmax}\\left(\\frac{QK^\\top}{\\sqrt{d}}\\right) V $$

\\begin{align}
a &= b + c \\\\
d &= \\sum_{i=1}^{n} e_i
\\end{align}

Steps:
1. forward
2. backward, with `torch.autograd` and sdpa_flash

![a picture](attachment:dot.png)

# A second top heading

It moves one level down; @fig-bars and @tbl-wide are below. An address a@b.example and @torch.compile stay as they are.
"""

WIDE = """columns = ["variant", "backend", "precision", "forward peak (GiB)", "backward peak (GiB)", "optimizer peak (GiB)",
    "reserved (GiB)", "tokens/s per GPU", "MFU (%)", "step time (ms)", "largest batch", "perplexity"]
df = pd.DataFrame([[f"variant-{i}", "sdpa_efficient", "bf16_autocast", *[1234.5678 / (i + j + 1) for j in range(9)]]
                   for i in range(45)], columns=columns)
show_table(df, "tbl-wide", "A wide and long table: 45 rows.")"""

NOISE = """import sys
from tqdm import tqdm
for _ in tqdm(range(50), desc="training"): pass
print("\\x1b[31mred\\x1b[0m plain"); print("x" * 250)
print("\\n".join(f"line {i}" for i in range(200)))
df.head(3)[["variant", "MFU (%)"]]"""

# A black 1 x 1 PNG.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="


def write_chapters(folder: Path) -> list[Path]:
    """A front page, a chapter with everything that goes well, and one with an error and an unfinished cell."""
    folder.mkdir(parents=True, exist_ok=True)
    memory = new_markdown_cell(MEMORY, attachments={"dot.png": {"image/png": PNG}})
    both = [
        new_markdown_cell(SUMMARY), new_code_cell(SETUP, metadata={"tags": ["remove-input"]}), new_code_cell(HEADLINE),
        memory, new_code_cell(FIGURES), new_code_cell(WIDE), new_code_cell(NOISE),
    ]  # fmt: skip
    executed = new_notebook(cells=both, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    # The kernel starts in the checkout, so that it imports this package whether or not it is installed.
    NotebookClient(executed, timeout=60, resources={"metadata": {"path": str(Path(__file__).parent.parent)}}).execute()
    first = new_notebook(cells=executed.cells[:3], metadata=executed.metadata)
    second = new_notebook(cells=executed.cells[3:], metadata=executed.metadata)
    paths = [folder / "00-summary.ipynb", folder / "01-memory.ipynb", folder / "02-broken.ipynb"]
    for path, notebook in zip(paths, [first, second, broken_notebook()], strict=True):
        nbformat.write(notebook, path)
    return paths


def broken_notebook() -> nbformat.NotebookNode:
    """What papermill leaves when a cell raises and when a kernel dies; its title comes from the file name."""
    error = new_output(
        "error",
        ename="OutOfMemoryError",
        evalue="CUDA out of memory: tried 2 GiB",
        traceback=["\x1b[0;31mTraceback\x1b[0m", "line 1 <b>"],
    )
    note = {"tags": ["papermill-error-cell-tag"]}
    return new_notebook(
        cells=[
            new_markdown_cell('<span id="papermill-error-cell">An Exception was encountered</span>', metadata=note),
            new_code_cell("steps = 10", metadata={"tags": ["parameters"]}),
            new_code_cell("steps = 99", metadata={"tags": ["injected-parameters"]}),
            new_code_cell("train()", outputs=[error], metadata={"papermill": {"status": "failed", "exception": True}}),
            new_code_cell("wait()", metadata={"papermill": {"status": "running"}}),
            new_code_cell("late()", metadata={"papermill": {"status": "pending"}}),
        ]
    )


def write_runs(root: Path, count: int = 3) -> list:
    """`count` finished runs (the third ran out of memory, the others have an executed notebook)."""
    outcomes = {2: ("oom", "peak 139.2 GiB of 139.8 GiB | at step 3")}
    for index in range(count):
        key = KEYS[index] if index < len(KEYS) else f"{index:012x}"
        run = RunId("memory", f"variant_{index}", key=key)
        folder = root / "memory" / run.folder
        folder.mkdir(parents=True)
        outcome, reason = outcomes.get(index, ("ok", None))
        code = {"version": "0.1.0", "hash": "f00dfeed" * 4, "commit": "c0ffee" * 6, "dirty": index == 1}
        command = "lsai run params/memory.yaml --only variant"
        Summary(run, "train", outcome, reason, "2025-03-01T12:00:00+00:00", 8.25 * (index + 1), command, code).write(
            folder
        )
        config = {"model": {"n_layers": 4 + index}, "precision": "bf16" if index else "fp32", "seed": 0}
        (folder / "config.json").write_text(json.dumps(config))
        env = {
            "machine": "laptop",
            "torch": "2.13.0",
            "gpu": None,
            "gpu_count": 0,
            "cpu": "Example CPU",
            "cpu_cores": 8,
        }
        (folder / "env.json").write_text(json.dumps(env))
        if outcome == "ok" and index < 3:
            cells = [
                new_markdown_cell(f"# Run {run.name}\n\nSee [another](#run-{KEYS[0]}), and @fig-never."),
                new_code_cell("1 + 1"),
            ]
            nbformat.write(new_notebook(cells=cells), folder / "notebook.ipynb")
    return find_runs(root)
