"""Report of a failed command: one line on standard error, and with ``--json`` an object on standard output."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Sequence

from slidesparse.base.ranks import is_first_to_fail
from slidesparse.cli import interruption
from slidesparse.errors import SlideSparseError, first_line, printable

REPORT = "run it again with --verbose, and report what that shows: it is a defect of slidesparse"


def report(error: BaseException, words: Sequence[str]) -> None:
    """Print the error of a command of these words, unless another process of the same run does.

    With ``--json``, ``{"error": {...}}`` goes to standard output too, which stays one JSON value.
    """
    if not is_first_to_fail():
        return
    line = describe(error)
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # a closed terminal
            print(f"slidesparse: {printable(line)}", file=sys.stderr)
    if "--json" in words:
        print_error(error.to_json() if isinstance(error, SlideSparseError) else fields(type(error).__name__, line))
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        drop_output()  # else Python would fail again at exit


def fields(kind: str, message: str) -> dict[str, str | None]:
    """Return an error without parts in the form of :meth:`slidesparse.errors.SlideSparseError.to_json`."""
    return {"kind": kind, "message": message, "what": message, "got": None, "needed": None, "remedy": None}


def print_error(error: dict[str, str | None]) -> None:
    """Print an error as JSON, in place of the result of a command with ``--json``."""
    with contextlib.suppress(OSError):  # standard error has the line
        print(printable(json.dumps({"error": error}, indent=2), keep="\n"))


def describe(error: BaseException) -> str:
    """Describe an error in one line.

    >>> describe(FileNotFoundError(2, "No such file or directory", "a.txt"))
    'a.txt cannot be used; got No such file or directory'
    """
    if isinstance(error, SlideSparseError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return interruption.describe(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'} cannot be used; got {error.strerror or error}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # of torch, not imported here
        return f"out of memory; got {first_line(error)}; use a smaller model, fewer tokens, or --device cpu"
    broken = _not_imported(error)
    if broken is not None:
        remedy = "check its environment variables, or install it again"
        return f"{broken} cannot be imported; got {first_line(error)}; {remedy}"
    return f"unexpected error; got {first_line(error)}; {REPORT}"


def _not_imported(error: BaseException) -> str | None:
    """Return the other package whose import failed with an error; None where none was being imported."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>")
    packages = (str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames)
    return next((name for name in packages if name not in ("slidesparse", "__main__")), None)


def drop_output() -> None:
    """Discard the rest of the output."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard output may be no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
