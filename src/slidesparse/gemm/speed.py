"""Measured times of whole layers, and the search for those of a layer here.

A table has the times of one :class:`Installation`, a GPU with its driver and libraries, which a start measured
(:mod:`slidesparse.tuning`). A packed form is compared with the dense time of the same comparison, quantisation and
scales included. The files are those of :mod:`slidesparse.gemm.speed_files`.

A form with a wrong result is wrong for its whole kind of layer, at all numbers of tokens: a table names it
(:class:`WrongForm`), and no time brings it back on that installation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from slidesparse.errors import InputError
from slidesparse.weights.pattern import Pattern

TOKENS_REACH = 2.0
"""Largest factor to a measured number of tokens at which another one needs no measurement."""

DENSE_FORM = "dense"
"""Name of the dense form, and of its times."""

MEASURED_HERE = "measured here"


@dataclass(frozen=True)
class Experts:
    """The experts of a measured layer.

    Attributes:
        count: Experts on the GPU; ``everywhere``: on all GPUs.
        top_k: Experts of a token.
        down: The pattern of down, where gate and up have another one.
        bits: Bits of a kept value in memory.
    """

    count: int
    everywhere: int
    top_k: int
    down: str | None = None
    bits: int = 8

    def __post_init__(self) -> None:
        if min(self.count, self.everywhere, self.top_k, self.bits) < 1:
            raise InputError("experts of a measured layer", got=str(self), needed="numbers of at least 1")
        if self.down is not None:
            Pattern.parse(self.down)

    def __str__(self) -> str:
        """Return ``64 of 128 experts, 8 a token, down 4:6, 6 bits``."""
        of = f" of {self.everywhere}" if self.everywhere != self.count else ""
        down = "" if self.down is None else f", down {self.down}"
        bits = "" if self.bits == 8 else f", {self.bits} bits"
        return f"{self.count}{of} experts, {self.top_k} a token{down}{bits}"


@dataclass(frozen=True)
class LayerSpeed:
    """The times of one linear layer, or of a layer's experts, with the sizes of gate and up.

    Attributes:
        dtype: ``int8``, ``fp8``, ``bf16``, ...
        out: Rows of the weight.
        columns: Columns of the weight, before lifting.
        tokens: The numbers of tokens M, ascending.
        us: ``dense``, or backend and pattern (``cusparselt 6:8``) -> microseconds at each M, None where it has none.
        experts: The experts; None of a linear.
    """

    dtype: str
    out: int
    columns: int
    tokens: tuple[int, ...]
    us: dict[str, tuple[float | None, ...]]
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if min(self.out, self.columns, *self.tokens, 1) < 1 or not self.tokens:
            raise InputError(
                "sizes of a measured layer", got=(self.out, self.columns, self.tokens), needed="at least 1"
            )
        if list(self.tokens) != sorted(set(self.tokens)):
            raise InputError("tokens of a measured layer", got=self.tokens, needed="ascending numbers")
        for name, times in self.us.items():
            if len(times) != len(self.tokens) or not all(us is None or 0 < us < math.inf for us in times):
                raise InputError(f"times of {name}", got=times, needed="one for each of the tokens, above zero")

    def __hash__(self) -> int:
        """Return a hash of all but the times, for caches."""
        return hash((self.dtype, self.out, self.columns, self.tokens, self.experts))

    def at(self, name: str, tokens: int) -> float | None:
        """Return the microseconds of a form at a measured M; None without a time."""
        return self.us[name][self.tokens.index(tokens)] if name in self.us else None

    def column(self, index: int) -> dict[str, float | None]:
        """Return the times at one M, by its index."""
        return {name: times[index] for name, times in self.us.items()}

    def updated(self, newer: LayerSpeed) -> LayerSpeed:
        """Return these times with those of a newer comparison, which replaces common M's."""
        columns = {
            m: layer.column(i)
            for layer in (self, newer)  # the last one wins
            for i, m in enumerate(layer.tokens)
        }
        tokens, names = sorted(columns), dict.fromkeys((*self.us, *newer.us))
        us = {name: tuple(columns[m].get(name) for m in tokens) for name in names}
        return replace(self, tokens=tuple(tokens), us=us)


@dataclass(frozen=True)
class Installation:
    """The GPU, driver and libraries of measured times.

    Attributes:
        gpu: Name of the device.
        capability: Its compute capability: ``9.0``.
        driver: Version of its driver; None if unknown.
        libraries: Backend -> :meth:`slidesparse.gemm.backend.Backend.library`: the revision of our own kernels, the
            version of a library.
    """

    gpu: str
    capability: str
    driver: str | None
    libraries: dict[str, str]


@dataclass(frozen=True)
class WrongForm:
    """A packed form of a kind of layer, as of :class:`LayerSpeed`, with a wrong result when measured.

    ``name`` is that of the form's times: ``cusparselt 6:8``.
    """

    dtype: str
    out: int
    columns: int
    name: str
    experts: Experts | None = None


@dataclass(frozen=True)
class SpeedTable:
    """The measured layers of one installation.

    Attributes:
        installation: The installation.
        layers: The times, of older comparisons first.
        wrong: The wrong forms.
    """

    installation: Installation
    layers: tuple[LayerSpeed, ...] = ()
    wrong: tuple[WrongForm, ...] = ()


def lacking(wanted: Iterable[int], measured: Sequence[int]) -> list[int]:
    """Return the M's without a measured one within :data:`TOKENS_REACH`.

    >>> lacking([16, 4096, 16384], [64, 8192])
    [16]
    """
    return [m for m in wanted if not any(m <= TOKENS_REACH * t and t <= TOKENS_REACH * m for t in measured)]


def times_key(backend: str, pattern: str) -> str:
    """Return the name of a backend's times in the file."""
    return DENSE_FORM if backend == DENSE_FORM else f"{backend} {pattern}"


def find_times(
    table: SpeedTable,
    backends: Sequence[str],
    dtype: str,
    pattern: str,
    out: int,
    columns: int,
    experts: Experts | None = None,
) -> LayerSpeed | None:
    """Return the times of a layer by backend alone (``cusparselt``, not ``cusparselt 6:8``), comparisons joined.

    None without a comparison of all ``backends``: one of eight bits has times of cuSPARSELt, too, and none of six bits.
    The other arguments are those of a :class:`LayerSpeed`.
    """
    found = None
    for layer in table.layers:
        if (layer.dtype, layer.out, layer.columns, layer.experts) != (dtype, out, columns, experts):
            continue
        us = {name: layer.us[key] for name in backends if (key := times_key(name, pattern)) in layer.us}
        if us.keys() == set(backends):
            own = replace(layer, us=us)
            found = own if found is None else found.updated(own)
    return found
