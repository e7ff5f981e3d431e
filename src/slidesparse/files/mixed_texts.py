"""Several texts, each with a weight: its share of the mixture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from slidesparse.errors import InputError

MOST = 1e6
"""Largest weight, and one over the smallest."""


@dataclass(frozen=True)
class WeightedText:
    """A text and its weight; :func:`offline.calibrate.texts.read_documents` reads ``file``."""

    file: str
    weight: float = 1.0


def weighted(text: str) -> WeightedText:
    """Parse ``FILE`` or ``FILE:WEIGHT``; a file of this whole name comes first.

    Raises:
        InputError: The weight is not above zero.

    >>> weighted("chats.jsonl:0.5")
    WeightedText(file='chats.jsonl', weight=0.5)
    >>> weighted("owner/data:main")
    WeightedText(file='owner/data:main', weight=1.0)
    """
    file, colon, end = text.rpartition(":")
    try:
        weight = float(end)
    except ValueError:
        return WeightedText(text)
    if not colon or not file or os.path.lexists(text):
        return WeightedText(text)
    if not 1 / MOST <= weight <= MOST:
        raise InputError(f"weight of {file}", got=end, needed=f"{1 / MOST:g} to {MOST:g}")
    return WeightedText(file, weight)


def without_folder(text: str) -> str:
    """Remove the folder from ``FILE`` or ``FILE:WEIGHT``; names of data sets stay as they are.

    >>> without_folder("owner/data:python"), without_folder("/moved/away.txt:2")
    ('owner/data:python', 'away.txt:2')
    """
    file = weighted(text).file
    is_path = os.path.lexists(file) or file.startswith(("/", ".", "~"))
    return os.path.basename(os.path.abspath(file)) + text[len(file) :] if is_path else text


def shares(texts: Sequence[WeightedText], total: int) -> list[int]:
    """Divide a number by weights; remainders go to those that lost most by rounding down.

    >>> shares([WeightedText("a", 2), WeightedText("b"), WeightedText("c")], 6)
    [3, 2, 1]
    """
    exact = [total * one.weight / sum(each.weight for each in texts) for one in texts]
    counts = [math.floor(one) for one in exact]
    order = sorted(range(len(texts)), key=lambda index: (counts[index] - exact[index], index))
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return counts
