"""What git sees of notebooks: they enter it without outputs, by the filter that `make setup`
installs (standard input to output; with names, a check of these files), and those of recorded runs
stay as they were recorded. `before_saving` and `saved` are the hooks of `make lab`."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

# as JupyterLab calls it
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


_HIDDEN = re.compile(r"(?m)^#\| *echo: *false *$")
_recorded: dict[str, bytes] = {}  # pages of recorded runs that are being saved
RECORDED = ("reports", "recorded")  # below this folder of a laboratory


def stripped(text: str) -> str:
    """The notebook without outputs, execution counts and what editors and papermill leave in the
    metadata. JupyterLab folds the code that the report does not show (`#| echo: false`)."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        cell["metadata"] = {key: value for key, value in cell["metadata"].items() if key == "tags"}
        if _HIDDEN.search("".join(cell["source"])) and cell["cell_type"] == "code":
            cell["metadata"]["jupyter"] = {"source_hidden": True}
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    notebook["metadata"] = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    # keys as Jupyter orders them
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _unfolded(text: str) -> Any:
    """A notebook but for which of its code is folded, which is no matter of a check."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        cell["metadata"].pop("jupyter", None)
    return notebook


def before_saving(
    model: dict[str, Any], path: str, contents_manager: Any = None, **_: object
) -> None:
    """Jupyter's hook before saving. The page of a recorded run stays as it is on disk: JupyterLab
    saves by itself what its kernel says of its language; `saved` puts the file back. HTTP error 403
    if a cell was changed."""
    file = Path(contents_manager.root_dir) / path
    if model.get("type") != "notebook" or not file.exists() or file.parts[-6:-4] != RECORDED:
        return
    import nbformat  # the filter, which git calls for each notebook, needs neither
    from tornado.web import HTTPError

    recorded = nbformat.read(file, as_version=4)  # type: ignore[no-untyped-call]
    sources = [
        ["".join(cell["source"]) for cell in notebook["cells"]]
        for notebook in (recorded, model["content"])
    ]
    if sources[0] != sources[1]:
        words = "the page of a recorded run stays as it was recorded: save it under another name"
        raise HTTPError(403, words, reason=words)
    _recorded[str(file)] = file.read_bytes()


def saved(os_path: str, **_: object) -> None:
    """Jupyter's hook after saving. Git takes a file of another size for changed before it asks the
    filter; where nothing but outputs differ from what is staged, staging it again changes nothing
    but that."""
    if (recorded := _recorded.pop(os_path, None)) is not None:
        Path(os_path).write_bytes(recorded)
        return
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
    holding = [name for name, text in texts.items() if _unfolded(stripped(text)) != _unfolded(text)]
    sys.exit(f"with outputs or metadata of an execution: {', '.join(holding)}" if holding else 0)
