"""The exception family: whatever a message is made of, it is one line."""

from __future__ import annotations

import pytest

from slidesparse.errors import InputError, SlideSparseError


@pytest.mark.parametrize("end", ["\n", "\r\n", "\u2028", "\x85"])
def test_a_message_is_one_line(end: str) -> None:
    error = InputError(f"what{end}is wrong", got=f"a{end}b", needed=f"c{end}d", remedy=f"e{end}f")
    assert isinstance(error, SlideSparseError)
    assert str(error) == "what is wrong; got a b; needed c d; e f"
