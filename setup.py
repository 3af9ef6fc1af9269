"""The package is described in pyproject.toml; this adds to a wheel what `lsai new lab` lays out
(`lsai_lab/project/template.py`)."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lsai_lab.project.template import lay_out


class WithLaboratory(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            lay_out(Path(self.build_lib) / "lsai_lab" / "template")


setup(cmdclass={"build_py": WithLaboratory})
