from __future__ import annotations

import pytest

from slidesparse.base.readable_size import readable_size


@pytest.mark.parametrize(
    ("n_bytes", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (12_288, "12.3 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (15_100_000.4, "15.1 MB"),
        (7_251_200_000, "7.25 GB"),
        (3 * 10**12, "3.0 TB"),
        (4 * 10**15, "4000.0 TB"),
    ],
)
def test_a_size_is_a_small_number_of_three_digits(n_bytes: float, words: str) -> None:
    assert readable_size(n_bytes) == words
