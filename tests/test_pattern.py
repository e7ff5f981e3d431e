from __future__ import annotations

import math
from fractions import Fraction

import pytest
from decomposition import decompose
from oracles import all_supports, places_all

from slidesparse.errors import InputError
from slidesparse.weights.pattern import DENSE, Pattern

PATTERNS = [Pattern(group - 2, group) for group in range(4, 33, 2)]


def test_text_round_trip() -> None:
    for text in ("2:4", "4:6", "6:8", "30:32", "dense"):
        assert str(Pattern.parse(text)) == text
        assert Pattern.parse(Pattern.parse(text)) == Pattern.parse(text)


BAD_TEXTS = ["6_8", "8:6", "5:8", "6:8:10", "2:8", "6:", ":8", "6/8", "-6:8", "6.0:8.0", "6:7", "0:2", "32:34"]
BAD_TEXTS += ["2_inf", "foo", "", "6:8 ", " 6:8", "6:8\n", "4:6@", "4:6@50%", "4:6@100%", "4:4", "04:4"]


def test_bad_text_is_one_clear_line() -> None:
    for text in (*BAD_TEXTS, "dense@50%", None, 68):
        with pytest.raises(InputError, match="pattern"):
            Pattern.parse(text)


def test_bad_numbers() -> None:
    for numbers in ((3, 5), (32, 34), (0, 2), (4, 8), (6, 6)):
        with pytest.raises(InputError, match="not a sliding pattern"):
            Pattern(*numbers)


def test_dense_keeps_everything() -> None:
    assert (DENSE.expansion, DENSE.density, DENSE.ideal_speedup, DENSE.bytes_per_weight("2:4")) == (1, 1, 1, 1)
    assert sorted({Pattern(4, 6), Pattern.parse("dense"), Pattern(2, 4), DENSE}) == [
        Pattern(2, 4),
        DENSE,
        Pattern(4, 6),
    ]


@pytest.mark.parametrize("pattern", [PATTERNS[0], PATTERNS[1], PATTERNS[-1]], ids=str)
def test_theory_of_patterns(pattern: Pattern) -> None:
    n = pattern.group // 2
    assert pattern.windows == n - 1
    assert pattern.expansion == 2 - Fraction(2, n)
    assert pattern.ideal_speedup == Fraction(n, n - 1) == Fraction(pattern.group, pattern.keep)
    assert pattern.density + pattern.sparsity == 1
    covered = {position for j in range(pattern.windows) for position in pattern.window(j)}
    assert covered == set(range(pattern.group))
    assert [list(pattern.window(j)) for j in range(pattern.windows)] == [
        [2 * j, 2 * j + 1, 2 * j + 2, 2 * j + 3] for j in range(n - 1)
    ]
    with pytest.raises(InputError, match="window"):
        pattern.window(pattern.windows)


@pytest.mark.parametrize(
    ("text", "form", "bits", "bytes_per_weight"),
    [
        # Design section 3: kept values 0.75, plus two bits an entry, one byte a group, five bits a group.
        ("6:8", "2:4", 8, 0.9375),
        ("6:8", "code-byte", 8, 0.875),
        ("6:8", "code-bits", 8, 0.828125),
        ("6:8", "counts", 8, 0.84375),
        ("8:10", "counts", 8, 0.9),
        ("14:16", "counts", 8, 0.9375),
        ("6:8", "dense", 8, 1.0),
        ("2:4", "2:4", 8, 0.625),
        ("4:6", "2:4", 8, 5 / 6),
        ("6:8", "2:4", 16, 1.6875),
        ("6:8", "2:4", 4, 0.5625),
        # 32 columns have 496 codes: nine bits, so two bytes a group.
        ("30:32", "code-byte", 8, 1.0),
        ("30:32", "code-bits", 8, 0.97265625),
    ],
)
def test_memory(text: str, form: str, bits: int, bytes_per_weight: float) -> None:
    assert float(Pattern.parse(text).bytes_per_weight(form, bits)) == bytes_per_weight


def test_unknown_storage_form() -> None:
    with pytest.raises(InputError, match="storage form"):
        Pattern(6, 8).bytes_per_weight("1:4")


def test_groups_that_cover_columns() -> None:
    for columns, k_offset, groups in ((8, 0, 1), (9, 0, 2), (8, 1, 2), (1, 7, 1), (2, 7, 2)):
        assert Pattern(6, 8).groups(columns, k_offset) == groups


# -- general sources on general hardware ---------------------------------------------------------------------------

HARDWARE = [(1, 4), (2, 4), (1, 2), (2, 6), (3, 6), (1, 3), (4, 8)]


def _sources(hw_keep: int, hw_window: int) -> list[tuple[int, int]]:
    return [
        (keep, group)
        for group in range(hw_window, 11)
        for keep in range(1, group + 1)
        if keep * hw_window >= hw_keep * group
    ]


@pytest.mark.parametrize(("hw_keep", "hw_window"), HARDWARE)
def test_hall_condition_agrees_with_matching_every_support(hw_keep: int, hw_window: int) -> None:
    verdicts = set()
    for keep, group in _sources(hw_keep, hw_window):
        d = decompose(keep, group, hw_keep, hw_window)
        # A support that fits keeps fitting when it loses a position, so the full ones decide.
        fits = all(places_all(s, d.starts, hw_window, hw_keep) for s in all_supports(group, keep))
        assert d.feasible == fits, (keep, group)
        if d.counterexample is not None:
            assert len(set(d.counterexample)) <= keep
            assert set(d.counterexample) <= set(range(group))
            assert not places_all(d.counterexample, d.starts, hw_window, hw_keep)
        assert {p for s in d.starts for p in range(s, s + hw_window)} == set(range(group))
        assert d.expansion == Fraction(len(d.starts) * hw_window, group)
        assert d.speedup <= d.bound or not d.feasible
        verdicts.add(d.feasible)
    assert verdicts == {True, False}


def test_the_false_case_of_the_papers_theorem_2() -> None:
    d = decompose(2, 7, 1, 4)
    assert d.starts == (0, 3)
    assert len(d.starts) * d.hw_keep >= d.keep  # the paper's condition holds ...
    assert d.counterexample == (0, 1)  # ... and yet both lie in window 0 alone


@pytest.mark.parametrize("n", [2, 3, 4, 16])
def test_our_family_reaches_the_bound(n: int) -> None:
    d = decompose(2 * n - 2, 2 * n)
    assert d.feasible
    assert d.expansion == 2 - Fraction(2, n)
    assert d.speedup == d.bound == Pattern(2 * n - 2, 2 * n).ideal_speedup
    # One more non-zero than the windows can hold.
    assert not decompose(2 * n - 1, 2 * n).feasible


def test_sources_that_cannot_be_slid() -> None:
    for arguments in ((0, 8), (9, 8), (6, 8, 4, 4), (4, 4, 4, 4), (6, 8, 0, 4), (2, 3), (1, 8), (1, 4, 1, 8)):
        with pytest.raises(InputError):
            decompose(*arguments)


def test_codes_count_the_pairs_left_out() -> None:
    assert [p.codes for p in PATTERNS] == [math.comb(p.group, 2) for p in PATTERNS]
    assert Pattern(6, 8).codes == 28
