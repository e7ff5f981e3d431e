"""Sizes in bytes as text: the one place that knows the units."""

from __future__ import annotations


def readable_size(n_bytes: float) -> str:
    """Return a size with three digits and the unit that suits it.

    >>> readable_size(1530), readable_size(999_600), readable_size(7_251_200_000)
    ('1.53 kB', '1 MB', '7.25 GB')
    """
    size = float(n_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.5:  # which three digits would round up
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
