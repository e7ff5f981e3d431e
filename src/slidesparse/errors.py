"""The one exception family that users meet.

A message answers four questions in one line: what is wrong, what was got, what is needed, and what to do about it.
"""

from __future__ import annotations

import copyreg
import json

LONGEST = 500
"""Most characters of another library's message that one of ours repeats."""

LONGEST_LINE = 2000
"""Most characters of a line of ours: a checkpoint may have names of megabytes."""

PARTS = ("what", "got", "needed", "remedy")
UNFINISHED = (":", ",", " or", " and")
"""Ends of lines in the middle of a sentence."""


def first_line(error: BaseException) -> str:
    r"""Return the kind and first line of another library's error, for a message of ours, which has one line.

    A line that ends in a colon, a comma or such a word goes on in the next one.

    >>> first_line(ValueError("field 'a':\n    is no number\nsee the docs"))
    "ValueError: field 'a': is no number"
    >>> first_line(ValueError("one of:\n(1) a file,\n(2) a folder or\n(3) a name.\nInstall something."))
    'ValueError: one of: (1) a file, (2) a folder or (3) a name.'
    """
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    said = lines[:1]
    while said and said[-1].endswith(UNFINISHED) and len(said) < len(lines):
        said.append(lines[len(said)])
    return f"{type(error).__name__}: {' '.join(said)}"[:LONGEST]


def system_words(error: OSError) -> str:
    """Return what the system says of a file, without the number that Python puts before it.

    >>> system_words(FileNotFoundError(2, "No such file or directory", "r/a.txt"))
    'No such file or directory: r/a.txt'
    """
    if error.strerror is None:  # of a library
        return first_line(error)
    return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"


def printable(text: str, *, keep: str = "") -> str:
    r"""Return a text with whatever is not drawn (escape sequences, marks of direction) written out as JSON writes it.

    >>> print(printable("a\x1b[2Jb\u202ec\nd"))
    a\u001b[2Jb\u202ec\nd
    """
    text = text.replace("\x7f", "\\u007f")  # which JSON may hold as it is
    return "".join(c if c.isprintable() or c in keep else json.dumps(c)[1:-1] for c in text)


class SlideSparseWarning(UserWarning):
    """Something that works, though perhaps not as the user means it."""

    def __str__(self) -> str:
        return printable(super().__str__())


class SlideSparseError(Exception):
    """Base of every error that slidesparse raises on purpose.

    Args:
        what: What is wrong, naming the thing (a tensor, a file, an option).
        got: What was found.
        needed: What would have been right.
        remedy: What the user can do.
    """

    def __init__(self, what: str, *, got: object = None, needed: str | None = None, remedy: str | None = None) -> None:
        self.what, self.got, self.needed, self.remedy = what, got, needed, remedy
        said = zip(("", "got ", "needed ", ""), (what, got, needed, remedy), strict=True)
        text = "; ".join(f"{before}{part}" for before, part in said if part is not None)
        line = printable(" ".join(text.splitlines()))
        super().__init__(line if len(line) <= LONGEST_LINE else f"{line[:999]} ... {line[-990:]}")

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle the parts and the line, without a subclass's constructor, and what was got as its text."""
        got = None if self.got is None else str(self.got)
        return copyreg.__newobj__, (type(self), *self.args), {**vars(self), "got": got}  # type: ignore[attr-defined]

    def to_json(self) -> dict[str, str | None]:
        """Return the kind of the error, its line and the parts of it, each None where it has none."""
        return {
            "kind": type(self).__name__,
            "message": str(self),
            **{name: None if (part := vars(self)[name]) is None else str(part) for name in PARTS},
        }


class InputError(SlideSparseError, ValueError):
    """An argument, an option or a tensor that cannot be used."""

    def located(self, place: str, remedy: str | None = None) -> InputError:
        """Return this error with the place where it is, such as a file and a line; a remedy replaces its own.

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
        unit: What is counted.
        remedy: What the user can do.
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
    """Hardware, a library or a backend that cannot do what was asked for."""


class CheckpointError(SlideSparseError, RuntimeError):
    """A checkpoint on disk that is missing, damaged or of a kind that we do not handle."""

    @classmethod
    def of(cls, error: SlideSparseError, remedy: str | None = None) -> CheckpointError:
        """Return an error of a checkpoint with the parts of another one; a remedy replaces its own.

        >>> str(CheckpointError.of(InputError("version", got=3), "pack it again"))
        'version; got 3; pack it again'
        """
        return cls(error.what, got=error.got, needed=error.needed, remedy=remedy or error.remedy)
