"""A task with exact answers: arithmetic and operations on lists, one problem a line.

Problems whose text hashes to a held-out value are never trained on.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator

HELD_OUT_ONE_IN = 20


def _digits(rng: random.Random, least: int, most: int) -> list[int]:
    return [rng.randrange(10) for _ in range(rng.randint(least, most))]


def _spaced(values: list[int]) -> str:
    return " ".join(map(str, values))


def _add(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(1000), rng.randrange(1000)
    return f"add {a} {b}", str(a + b)


def _subtract(rng: random.Random) -> tuple[str, str]:
    a, b = sorted((rng.randrange(1000), rng.randrange(1000)), reverse=True)
    return f"sub {a} {b}", str(a - b)


def _multiply(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(100), rng.randrange(10)
    return f"mul {a} {b}", str(a * b)


def _sort(rng: random.Random) -> tuple[str, str]:
    values = _digits(rng, 4, 7)
    return f"sort {_spaced(values)}", _spaced(sorted(values))


def _reverse(rng: random.Random) -> tuple[str, str]:
    values = _digits(rng, 4, 8)
    return f"reverse {_spaced(values)}", _spaced(values[::-1])


def _count(rng: random.Random) -> tuple[str, str]:
    values = [rng.randrange(4) for _ in range(rng.randint(5, 9))]
    wanted = rng.randrange(4)
    return f"count {wanted} in {_spaced(values)}", str(values.count(wanted))


KINDS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "add": _add,
    "sub": _subtract,
    "mul": _multiply,
    "sort": _sort,
    "reverse": _reverse,
    "count": _count,
}


def problems(kind: str, seed: int, held_out: bool) -> Iterator[tuple[str, str]]:
    """Question and answer, without end: ``add 17 25 =`` and `` 42\\n``."""
    rng = random.Random(f"{kind}-{seed}-{held_out}")
    while True:
        question, answer = KINDS[kind](rng)
        if (zlib.crc32(question.encode()) % HELD_OUT_ONE_IN == 0) == held_out:
            yield f"{question} =", f" {answer}\n"
