"""The exception family: whatever a message is made of, it is one line."""

from __future__ import annotations

import copy
import pickle

import pytest

from slidesparse.base.ranks import LostRank
from slidesparse.errors import CheckpointError, InputError, PatternViolation, SlideSparseError, UnsupportedError
from slidesparse.tuning.checking import WrongResult

KINDS = [InputError, UnsupportedError, CheckpointError, WrongResult, LostRank]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\u2028", "\x85"])
def test_a_message_is_one_line(end: str) -> None:
    error = InputError(f"what{end}is wrong", got=f"a{end}b", needed=f"c{end}d", remedy=f"e{end}f")
    assert isinstance(error, SlideSparseError)
    assert str(error) == "what is wrong; got a b; needed c d; e f"


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
