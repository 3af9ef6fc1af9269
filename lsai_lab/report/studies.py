"""The studies of the laboratory and the other files of its `params/`."""

from typing import Any

import pandas as pd

from lsai_core.base.errors import UserError, hint
from lsai_lab.project.files import load_yaml
from lsai_lab.report.load import names_of_studies, session
from lsai_lab.runs.frames import Frame
from lsai_lab.runs.study import Study


def studies() -> pd.DataFrame:
    """The laboratory's studies, one row each: `study` (its name), `title`, and `recorded`, how many
    committed runs it has; of one that cannot be read the title says why.

    >>> lab.studies().query("study == 'memory'")["title"].item()
    'Memory-efficient training'
    """
    committed = session().root / "reports" / "recorded"
    rows = [
        {
            "study": name,
            "title": _title(name),
            "recorded": len(list(committed.glob(f"*/{name}/*/summary.json"))),
        }
        for name in names_of_studies()
    ]
    return Frame(rows, columns=["study", "title", "recorded"])


def _title(name: str) -> str:
    try:
        return study(name).title
    except UserError as error:
        return f"cannot be read: {error}"


def parameters(name: str) -> dict[str, Any]:
    """The file `params/<name>.yaml`. UserError if there is none, or it cannot be read."""
    path = session().root / "params" / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f"there is no file params/{name}.yaml{hint(name, parameter_files())}")
    return load_yaml(path)


def parameter_files() -> list[str]:
    """What `parameters` can read, by name: `scale`, `profiles/quick`."""
    folder = session().root / "params"
    found = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml")]
    return sorted(path.as_posix() for path in found)


def study(name: str) -> Study:
    """The description of a study under this machine's profile: title, question, baseline, parts,
    variants.

    >>> study = lab.study("memory")
    >>> study.baseline, len(study.variants)
    ('baseline', 8)
    """
    return session().study(name)
