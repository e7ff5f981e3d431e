"""The exception family: whatever a message is made of, it is one line."""

from __future__ import annotations

import copy
import pickle

import pytest

from slidesparse.base.ranks import LostRank
from slidesparse.errors import (
    CheckpointError,
    InputError,
    PatternViolation,
    SlideSparseError,
    UnsupportedError,
    library_errors,
)
from slidesparse.tuning.checking import WrongResult

KINDS = [InputError, UnsupportedError, CheckpointError, WrongResult, LostRank]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\u2028", "\x85"])
def test_a_message_is_one_line(end: str) -> None:
    error = InputError(f"what{end}is wrong", got=f"a{end}b", needed=f"c{end}d", remedy=f"e{end}f")
    assert isinstance(error, SlideSparseError)
    assert str(error) == "what is wrong; got a b; needed c d; e f"


@pytest.mark.parametrize(
    ("outer", "inner", "says"),
    [
        (
            "cannot connect",
            TimeoutError("no answer in 10 s"),
            "cannot connect (because of TimeoutError: no answer in 10 s)",
        ),
        ("field 'a': is 3", TypeError("is 3"), "field 'a': is 3"),
        ("no model", TimeoutError(), "no model"),
    ],
)
def test_a_librarys_error_says_its_innermost_cause(outer: str, inner: Exception, says: str) -> None:
    middle, error = RuntimeError("in between"), OSError(outer)
    middle.__cause__, error.__cause__ = inner, middle
    with pytest.raises(CheckpointError) as raised, library_errors(CheckpointError, "wrong", remedy="mend it"):
        raise error
    assert str(raised.value) == f"wrong; got OSError: {says}; mend it"
    with pytest.raises(InputError, match="ours"), library_errors(CheckpointError, "wrong"):
        raise InputError("ours")


@pytest.mark.parametrize(
    "error",
    [
        *(kind("what", got=map(str, ()), needed="a list", remedy="pass one") for kind in KINDS),
        PatternViolation("w", "6:8", 1, 2, 7, 3, unit="values"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_copied_and_go_from_process_to_process(error: SlideSparseError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (type(other), str(other), other.args) == (type(error), str(error), error.args)
        assert other.to_json() == error.to_json()
        assert vars(other) == {**vars(error), "got": str(error.got)}
