"""Which machines the runs are of: their labels, explained."""

import pandas as pd

from lsai_lab.analysis.summary import require_columns
from lsai_lab.project.files import load_yaml
from lsai_lab.report.load import load, session
from lsai_lab.runs.frames import Frame


def machines(runs: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row a machine, by the label that stands in the column `machine` of `lab.load`: its `gpu`,
    the most `gpus` of a run, the `days`, how many `runs`, and `about`, what a label of records
    stands for. `runs`: of these rows of `lab.load`; without it, of all that it gives.

    >>> lab.machines().query("machine == 'h200-d'")["about"].item()
    'five seeds of memory; its speeds do not count'
    """
    runs = load() if runs is None else runs
    require_columns(("machine", "started"), runs)
    labels = runs.groupby("machine")
    days = pd.to_datetime(runs["started"].str[:10]).dt.strftime("%b %d").str.replace(" 0", " ")
    ends = runs["started"].groupby(runs["machine"]).agg(["idxmin", "idxmax"])
    found = labels.agg(gpu=("gpu", "first"), gpus=("env.gpu_count", "max"))
    found["days"] = [" to ".join(dict.fromkeys(days[[*pair]])) for pair in ends.to_numpy()]
    path = session().root / "reports" / "recorded" / "machines.yaml"
    about = load_yaml(path) if path.exists() else {}
    found["runs"], found["about"] = labels.size(), found.index.map(about).fillna("")
    return Frame(found.reset_index())
