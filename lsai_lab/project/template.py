"""What a laboratory outside a checkout begins with: in a wheel it lies in `template/` (setup.py
puts it there), in a checkout at its root.

setup.py imports this file before anything is installed, so it needs the standard library only.
"""

import shutil
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_NAMES = ("notebooks", "params", "envs", "reports", "Makefile")
_MADE = shutil.ignore_patterns(
    *("_build", "_output", "_quarto-*", "colors.css", ".*", "runs", "data", "files", "explore"),
    *("rendering-*", "*_files", "__pycache__", "local.yaml"),
)


def lay_out(target: Path) -> None:
    """Copy notebooks, parameters, the report's templates and records, and the Makefile to `target`;
    nothing that was rendered."""
    source = _PACKAGE / "template" if (_PACKAGE / "template").is_dir() else _PACKAGE.parent
    target.mkdir(parents=True, exist_ok=True)
    for name in _NAMES:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, ignore=_made, dirs_exist_ok=True)
        else:
            shutil.copy(source / name, target / name)


def _made(folder: str, names: list[str]) -> set[str]:
    bound = {name for name in names if Path(folder).name == "reports" and name.endswith(".ipynb")}
    return _MADE(folder, names) | bound
