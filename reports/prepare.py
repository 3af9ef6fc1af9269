"""What Quarto calls before and after it renders: before, the executed chapters must be there; after, the search gets its index as a script."""

import os
import sys
from pathlib import Path

here = Path(__file__).resolve().parent
index = Path(os.environ.get("QUARTO_PROJECT_OUTPUT_DIR", here / "_book")) / "search.json"
if not (here / "index.ipynb").exists():
    sys.exit("the chapters are not executed yet: run `make report NO_RUN=1` first")
if "QUARTO_PROJECT_OUTPUT_FILES" in os.environ and index.exists():
    index.with_suffix(".js").write_text(f"window.searchIndex = {index.read_text()};\n")
    index.unlink()
