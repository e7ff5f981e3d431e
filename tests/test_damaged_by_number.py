"""Damaged checkpoints and arguments: success that can be loaded and run, or one line and nothing changed.

The cases are numbers, the same everywhere; ``tests/fuzzed.py`` tries others by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzzed import make_sources, run_cases

CASES = 64
"""As many as take a few seconds."""

ONCE_WRONG = (616, 839, 2113)
"""Settings of generation that only loading looked at; a norm with NaN in it that was packed; a tensor in float64."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sources(tmp_path_factory.mktemp("fuzzed"))


@pytest.mark.parametrize("start", range(0, CASES, 16))
def test_right_or_refused(sources: Path, start: int) -> None:
    assert list(run_cases(range(start, start + 16), sources)) == []


@pytest.mark.parametrize("number", ONCE_WRONG)
def test_what_was_wrong_before_is_right(sources: Path, number: int) -> None:
    assert list(run_cases(range(number, number + 1), sources)) == []
