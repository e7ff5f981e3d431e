from __future__ import annotations

import math
from fractions import Fraction

import pytest

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
        ("6:8", "dense", 8, 1.0),
        ("4:6", "2:4", 8, 5 / 6),
        ("6:8", "2:4", 16, 1.6875),
        # 32 columns have 496 codes: nine bits, so two bytes a group.
        ("30:32", "code-byte", 8, 1.0),
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


def test_codes_count_the_pairs_left_out() -> None:
    assert [p.codes for p in PATTERNS] == [math.comb(p.group, 2) for p in PATTERNS]
    assert Pattern(6, 8).codes == 28
