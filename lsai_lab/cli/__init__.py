"""The command line: `lsai <command>`. The commands are bound in `app.py`; this file turns what ends
them into one line.

Exit codes: 0 done, 1 something ran and failed (or a claim fell), 2 the request was wrong, 130
interrupted by Ctrl-C. The commands are imported when they are called for, so that Ctrl-C in these
seconds ends with a line, too.
"""

import io
import sys

from lsai_core.base.errors import not_installed


def main() -> None:
    """Entry point of the `lsai` command."""
    # a locale that lacks a character must not end a command
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        _run()
    except KeyboardInterrupt:
        print("interrupted before anything began", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as error:
        if (line := not_installed(error)) is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)


def _run() -> None:
    from lsai_core.base.errors import Unavailable, UserError
    from lsai_lab.cli.app import Interrupted, app
    from lsai_lab.launch.stop import Stopped

    try:
        app()
    except (UserError, Unavailable) as error:
        print(
            f"{'error' if isinstance(error, UserError) else 'unavailable here'}: {error}",
            file=sys.stderr,
        )
        sys.exit(2)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.exit_code)
    except Interrupted:
        print(
            "\ninterrupted; finished runs are kept, the same command goes on from there",
            file=sys.stderr,
        )
        sys.exit(130)
