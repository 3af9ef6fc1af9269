"""How a test's process ends that worked with others."""

import os
import sys
from typing import NoReturn


def leave() -> NoReturn:
    """End this process, its work done, as a run's own workers do: gloo's threads can abort one
    while Python takes itself down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
