"""Quarto calls this before it renders, when the chapters must be there, and after, to give its
search a script."""

import os
import sys
from pathlib import Path

if not Path(__file__).with_name("index.ipynb").exists():
    sys.exit("the chapters are not executed yet: run `make report NO_RUN=1` first")
index = Path(os.environ.get("QUARTO_PROJECT_OUTPUT_DIR", "_book"), "search.json")
if index.exists():
    index.with_suffix(".js").write_text(f"window.searchIndex = {index.read_text()};\n")
