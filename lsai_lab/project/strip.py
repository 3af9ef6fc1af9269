"""Notebooks enter git without outputs: the filter that `make setup` installs (standard input to
output), or a check of the files named."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

# as JupyterLab calls it
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def stripped(text: str) -> str:
    """The notebook without outputs, execution counts and what editors and papermill leave in the
    metadata."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        cell["metadata"] = {key: value for key, value in cell["metadata"].items() if key == "tags"}
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    notebook["metadata"] = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    # keys as Jupyter orders them
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def saved(os_path: str, **_: object) -> None:
    """Jupyter's hook after saving. Git takes a file of another size for changed before it asks the
    filter; where nothing but outputs differ from what is staged, staging it again changes nothing
    but that."""
    git = ["git", "-C", str(Path(os_path).parent)]
    with contextlib.suppress(OSError):
        if (
            subprocess.run([*git, "diff", "--quiet", "--", os_path], capture_output=True).returncode
            == 0
        ):
            subprocess.run([*git, "add", "-u", "--", os_path], capture_output=True)


if __name__ == "__main__":
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    if not sys.argv[1:]:
        sys.stdout.write(stripped(sys.stdin.read()))
    texts = {name: Path(name).read_text(encoding="utf-8") for name in sys.argv[1:]}
    holding = [
        name for name, text in texts.items() if json.loads(stripped(text)) != json.loads(text)
    ]
    sys.exit(f"with outputs or metadata of an execution: {', '.join(holding)}" if holding else 0)
