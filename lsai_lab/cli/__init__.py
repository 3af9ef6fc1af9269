"""The command line: `lsai <command>`. The commands are bound in `app.py`; this file turns what ends
them into one line.

Exit codes: 0 done, 1 something ran and failed (or a claim fell), 2 the request was wrong, 130
interrupted by Ctrl-C. The commands are imported when they are called for, so that Ctrl-C in these
seconds ends with a line, too.
"""

import io
import os
import sys
from typing import NoReturn

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
    from lsai_core.base.plugins import own_fault
    from lsai_lab.cli.app import Interrupted, app
    from lsai_lab.launch.stop import Stopped

    try:
        _require_text()
        app()
    except (UserError, Unavailable) as error:
        _refuse("error" if isinstance(error, UserError) else "unavailable here", str(error))
    except OSError as error:
        if error.errno is None or error.filename is None:
            raise
        # What a path says is wrong with this machine or the request, not with the program.
        _refuse("error", f"{error.filename}: {error.strerror}")
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.exit_code)
    except Interrupted:
        print(
            "\ninterrupted; finished runs are kept, the same command goes on from there",
            file=sys.stderr,
        )
        sys.exit(130)
    except Exception as error:  # of a technique of the laboratory, in one line
        if (fault := own_fault(error)) is None:
            raise
        _refuse("error", fault)


def _require_text() -> None:
    """UserError for words that are no text: they would stand in records, which are UTF-8."""
    from lsai_core.base.errors import UserError

    told = {f"argument {number}": word for number, word in enumerate(sys.argv) if number}
    told |= {name: value for name, value in os.environ.items() if name.startswith("LSAI_")}
    for place, word in told.items():
        try:
            os.fsencode(word).decode()  # the bytes that were given, in whatever locale
        except UnicodeDecodeError:
            raise UserError(f"{place} is not UTF-8 text: {word!r}") from None


def _refuse(what: str, why: str) -> NoReturn:
    """End with one line, whatever names and messages of libraries stand in it."""
    print(f"{what}: {' '.join(why.splitlines())}", file=sys.stderr)
    sys.exit(2)
