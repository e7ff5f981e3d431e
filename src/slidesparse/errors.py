"""The one exception family that users meet.

A message answers four questions in one line: what is wrong, what was got, what is needed, and what to do about it.
"""

from __future__ import annotations

import copyreg
import json
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 500
"""Most characters that a message of ours repeats of another library's."""

LONGEST_LINE = 2000
"""Most characters of one of our messages: a checkpoint may have names of megabytes."""

PARTS = ("what", "got", "needed", "remedy")
UNFINISHED = (":", ",", " or", " and")
"""Ends of lines in the middle of a sentence."""


def first_line(error: BaseException) -> str:
    r"""Return the kind and the first line of another library's error, for one of our messages.

    A line that ends in one of :data:`UNFINISHED` goes on in the next one. The innermost cause follows, if it says more.

    >>> first_line(ValueError("field 'a':\n    is no number\nsee the docs"))
    "ValueError: field 'a': is no number"
    >>> first_line(ValueError("one of:\n(1) a file,\n(2) a folder or\n(3) a name.\nInstall something."))
    'ValueError: one of: (1) a file, (2) a folder or (3) a name.'
    """
    inner, said = error, _kind_and_line(error)
    for _ in range(9):  # an error may be its own cause
        inner = inner.__cause__ or inner
    why = _kind_and_line(inner)
    return said if why.partition(": ")[2] in said else f"{said[: LONGEST // 2]} (because of {why})"[:LONGEST]


def _kind_and_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    first = lines[:1]
    while first and first[-1].endswith(UNFINISHED) and len(first) < len(lines):
        first.append(lines[len(first)])
    return f"{type(error).__name__}: {' '.join(first)}".removesuffix(": ")[:LONGEST]


@contextmanager
def library_errors(kind: type[SlideSparseError], what: str, **parts: str | None) -> Iterator[None]:
    """Raise any error of another library in the block, which a damaged file can cause, as one of this kind."""
    try:
        yield
    except SlideSparseError:
        raise
    except Exception as error:
        raise kind(what, got=first_line(error), **parts) from error


def system_words(error: OSError) -> str:
    """Return the system's message about a file, without the number that Python puts before it.

    >>> system_words(FileNotFoundError(2, "No such file or directory", "r/a.txt"))
    'No such file or directory: r/a.txt'
    """
    if error.strerror is None:  # of a library
        return first_line(error)
    return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"


def printable(text: str, *, keep: str = "") -> str:
    r"""Return a text with unprintable characters (escape sequences, direction marks) escaped as in JSON.

    >>> print(printable("a\x1b[2Jb\u202ec\nd"))
    a\u001b[2Jb\u202ec\nd
    """
    text = text.replace("\x7f", "\\u007f")  # JSON does not escape it
    return "".join(c if c.isprintable() or c in keep else json.dumps(c)[1:-1] for c in text)


class SlideSparseWarning(UserWarning):
    """A warning of something that works, though perhaps not as intended."""

    def __str__(self) -> str:
        return printable(super().__str__())


class SlideSparseError(Exception):
    """Base of every error that slidesparse raises on purpose.

    Args:
        what: The fault, with the name of the tensor, file or option.
        got: The value that was found.
        needed: The values that are accepted.
        remedy: An action for the user.
    """

    def __init__(self, what: str, *, got: object = None, needed: str | None = None, remedy: str | None = None) -> None:
        self.what, self.got, self.needed, self.remedy = what, got, needed, remedy
        parts = zip(("", "got ", "needed ", ""), (what, got, needed, remedy), strict=True)
        text = "; ".join(f"{before}{part}" for before, part in parts if part is not None)
        line = printable(" ".join(text.splitlines()))
        super().__init__(line if len(line) <= LONGEST_LINE else f"{line[:999]} ... {line[-990:]}")

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle the parts and the line, without a subclass's constructor; ``got`` as text."""
        got = None if self.got is None else str(self.got)
        return copyreg.__newobj__, (type(self), *self.args), {**vars(self), "got": got}  # type: ignore[attr-defined]

    def to_json(self) -> dict[str, str | None]:
        """Return the kind, the line and the parts of the error; None for parts that it lacks."""
        return {
            "kind": type(self).__name__,
            "message": str(self),
            **{name: None if (part := vars(self)[name]) is None else str(part) for name in PARTS},
        }


class InputError(SlideSparseError, ValueError):
    """An argument, an option or a tensor that cannot be used."""

    def located(self, place: str, remedy: str | None = None) -> InputError:
        """Return this error with its place, such as a file and a line; ``remedy`` replaces its own.

        >>> str(InputError("version", got=3, needed="2").located("table.json", "delete it"))
        'table.json: version; got 3; needed 2; delete it'
        """
        return InputError(f"{place}: {self.what}", got=self.got, needed=self.needed, remedy=remedy or self.remedy)


class PatternViolation(InputError):
    """A weight with more non-zeros in a group than its pattern allows.

    Attributes:
        tensor: Name of the weight.
        row: First offending output row.
        group: First offending column group of that row.
        count: Non-zeros found there.
        violations: Offending (row, group) pairs in the whole weight.

    Args:
        unit: The noun of ``count``.
        remedy: An action for the user.
    """

    def __init__(
        self,
        tensor: str,
        pattern: object,
        row: int,
        group: int,
        count: int,
        violations: int,
        *,
        unit: str = "non-zeros",
        remedy: str = "prune it first (slidesparse.prune_mask, or method='magnitude')",
    ) -> None:
        self.tensor, self.row, self.group, self.count, self.violations = tensor, row, group, count, violations
        super().__init__(
            f"{tensor} violates {pattern} at row {row}, group {group} ({violations} such groups)",
            got=f"{count} {unit}",
            needed=f"at most {getattr(pattern, 'keep', '?')}",
            remedy=remedy,
        )


class UnsupportedError(SlideSparseError, RuntimeError):
    """A request that this hardware, library or backend cannot serve."""


class CheckpointError(SlideSparseError, RuntimeError):
    """A checkpoint on disk that is missing, damaged or not supported."""

    @classmethod
    def of(cls, error: SlideSparseError, remedy: str | None = None) -> CheckpointError:
        """Return another error as one of a checkpoint; ``remedy`` replaces its own.

        >>> str(CheckpointError.of(InputError("version", got=3), "pack it again"))
        'version; got 3; pack it again'
        """
        return cls(error.what, got=error.got, needed=error.needed, remedy=remedy or error.remedy)
