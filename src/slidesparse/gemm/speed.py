"""Measured times of whole layers, and the search for those that apply to a layer here.

A table has the times of one :class:`Installation`: a GPU with its driver and libraries. Times of this installation and
of a layer's own size are *measured here*: by the plugin and ``slidesparse.load`` when they load a model
(:mod:`slidesparse.tuning`). All others, with those that ship, are a *prior*: used, and
named as such, where nothing was measured here. A packed form is compared with the dense time of the same comparison,
quantisation and scales included. The files are those of :mod:`slidesparse.gemm.speed_files`.

A form with a wrong result is wrong for its whole kind of layer, at all numbers of tokens: a table names it
(:class:`WrongForm`), and no time of any table brings it back on that installation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from slidesparse.errors import InputError
from slidesparse.weights.pattern import Pattern

SIZE_REACH = 2.0
"""Largest factor between the sizes of a measured layer and of one that it stands in for; the nearest is taken."""

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

    def of_size(self, out: int, columns: int) -> LayerSpeed:
        """Return the times of a layer of another size, scaled by the number of weights."""
        factor = out * columns / (self.out * self.columns)
        us = {name: tuple(None if t is None else t * factor for t in times) for name, times in self.us.items()}
        return replace(self, out=out, columns=columns, us=us)

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

    def without(self, names: Iterable[str]) -> LayerSpeed:
        """Return these times with None at every M for some names."""
        gone = dict.fromkeys(self.us.keys() & set(names), (None,) * len(self.tokens))
        return replace(self, us={**self.us, **gone})

    def distance(self, out: int, columns: int) -> float:
        """Return the distance of another size: the larger difference of rows or of columns, in octaves."""
        return max(abs(math.log2(self.out / out)), abs(math.log2(self.columns / columns)))


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

    def differences(self, here: Installation, backends: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Return the differences from the installation here, for these backends: pairs (there, here), each once."""
        pairs = [(self.gpu, here.gpu)]
        if self.driver is not None and here.driver is not None:
            pairs.append((f"driver {self.driver}", f"driver {here.driver}"))
        pairs += [(self.libraries[name], here.libraries[name]) for name in backends]
        return tuple(dict.fromkeys((there, own) for there, own in pairs if there != own))


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

    def is_of(self, layer: LayerSpeed) -> bool:
        """Return whether the form is of this kind of layer."""
        sizes = layer.dtype, layer.out, layer.columns, layer.experts
        return (self.dtype, self.out, self.columns, self.experts) == sizes


@dataclass(frozen=True)
class SpeedTable:
    """The measured layers of one installation.

    Attributes:
        installation: The installation.
        layers: The times, of older comparisons first.
        packaged: Whether the table ships with the package, and so is of another machine.
        wrong: The wrong forms; they have no time in any of the layers.
    """

    installation: Installation
    layers: tuple[LayerSpeed, ...]
    packaged: bool = False
    wrong: tuple[WrongForm, ...] = ()

    def is_of(self, here: Installation, backends: Iterable[str]) -> bool:
        """Return whether the table is of the installation here, as far as these backends go."""
        there = self.installation
        alike = all(there.libraries.get(name) == here.libraries.get(name) for name in backends)
        return not self.packaged and (there.gpu, there.driver) == (here.gpu, here.driver) and alike

    def wrong_names(self, layer: LayerSpeed) -> set[str]:
        """Return the names of a layer's wrong forms."""
        return {form.name for form in self.wrong if form.is_of(layer)}


@dataclass(frozen=True)
class MeasuredLayer:
    """A measured layer, and its GPU.

    Attributes:
        layer: The layer, its times by backend alone (``cusparselt``, not ``cusparselt 6:8``).
        here: The M's whose times are of this installation and of the wanted size.
        others: Differences of the installations of its other times: pairs (there, here), each once.
    """

    layer: LayerSpeed
    here: tuple[int, ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    gpu: str = ""

    def rank(self, gpu: str, out: int, columns: int) -> tuple[bool, bool, int, float]:
        """Return a sort key for a layer of some size on a GPU: the lower, the better the match.

        Another size counts as one more difference. On another GPU no other difference counts: two cards differ by more
        than two revisions of a kernel.
        """
        foreign, distance = self.gpu != gpu, self.layer.distance(out, columns)
        return not self.here, foreign, 0 if foreign else len(self.others) + (distance > 0), distance

    def as_prior(self, names: Mapping[str, str]) -> MeasuredLayer:
        """Return these times, of eight bits, as a prior for six; ``names``: backend for eight -> that for six."""
        us = {names.get(name, name): times for name, times in self.layer.us.items()}
        others = *self.others, ("8 bits", "6 bits")
        return replace(self, layer=replace(self.layer, us=us), here=(), others=others)

    def describe(self) -> str:
        """Return ``measured here``, or ``prior: measured at 64x64 with torch 2.11; this is torch 2.14``."""
        if self.here == self.layer.tokens:
            return MEASURED_HERE
        prior = f"prior: measured at {self.layer.out}x{self.layer.columns}"
        if self.others:
            there, here = (" and ".join(dict.fromkeys(names)) for names in zip(*self.others, strict=True))
            prior += f" with {there}; this is {here}"
        if not self.here:
            return prior
        return f"{MEASURED_HERE} from {self.here[0]} to {self.here[-1]} tokens; past them {prior}"


def lacking(wanted: Iterable[int], measured: Sequence[int]) -> list[int]:
    """Return the M's without a measured one within :data:`TOKENS_REACH`.

    >>> lacking([16, 4096, 16384], [64, 8192])
    [16]
    """
    return [m for m in wanted if not any(m <= TOKENS_REACH * t and t <= TOKENS_REACH * m for t in measured)]


def times_key(backend: str, pattern: str) -> str:
    """Return the name of a backend's times in the file."""
    return DENSE_FORM if backend == DENSE_FORM else f"{backend} {pattern}"


def is_wrong(tables: Iterable[SpeedTable], here: Installation, backend: str, form: WrongForm) -> bool:
    """Return whether a form was wrong here, with the same libraries of its backend and of dense."""
    return any(form in table.wrong and table.is_of(here, (DENSE_FORM, backend)) for table in tables)


def find_nearest(
    tables: Sequence[SpeedTable],
    here: Installation,
    dtype: str,
    pattern: str,
    out: int,
    columns: int,
    experts: Experts | None = None,
) -> MeasuredLayer | None:
    """Return the measured layer of this type and pattern that is nearest in size, within :data:`SIZE_REACH`.

    A layer measured here comes first; then those with fewer differences in installation and size
    (:meth:`MeasuredLayer.rank`); then those of the first table. Times of these backends at the same size in another
    table are added below its fewest tokens and above its most: a user who measured few numbers of tokens keeps the
    packaged times of the others. None if no layer has a packed time.

    ``here`` has the libraries of the backends to compare. With dense among them, layers without a dense time are left
    out. The other arguments are those of a :class:`LayerSpeed`.
    """
    known = (
        _seen_from(here, table, layer, (out, columns))
        for table in tables
        for layer in _known_layers(table, here.libraries, dtype, pattern, (out, columns), experts)
    )
    ranked = sorted(known, key=lambda one: one.rank(here.gpu, out, columns))
    if not ranked:
        return None
    best = ranked[0]
    for other in ranked[1:]:
        best = _extended(best, other)
    return best


def _known_layers(
    table: SpeedTable,
    libraries: Mapping[str, str],
    dtype: str,
    pattern: str,
    near: tuple[int, int],
    experts: Experts | None,
) -> list[LayerSpeed]:
    """Return the layers of a type and about a size with a packed time at a pattern, comparisons of one size joined.

    Wrong forms are left out: with another driver or kernel they may be right, and "no time" is no prior.
    """
    by_size: dict[tuple[int, int], LayerSpeed] = {}
    for layer in table.layers:
        if (layer.dtype, layer.experts) != (dtype, experts) or layer.distance(*near) > math.log2(SIZE_REACH):
            continue
        times = _times(layer, pattern, (name for name in libraries if name in table.installation.libraries))
        wrong = table.wrong_names(layer)
        times = {name: us for name, us in times.items() if times_key(name, pattern) not in wrong}
        if _is_comparable(times, libraries):
            own, size = replace(layer, us=times), (layer.out, layer.columns)
            by_size[size] = by_size[size].updated(own) if size in by_size else own
    return list(by_size.values())


def _seen_from(here: Installation, table: SpeedTable, layer: LayerSpeed, size: tuple[int, int]) -> MeasuredLayer:
    others = table.installation.differences(here, layer.us)
    own = table.is_of(here, layer.us) and (layer.out, layer.columns) == size
    return MeasuredLayer(layer, layer.tokens if own else (), others, table.installation.gpu)


def _times(layer: LayerSpeed, pattern: str, backends: Iterable[str]) -> dict[str, tuple[float | None, ...]]:
    """Return backend -> a layer's times at one pattern, of backends with times."""
    keys = {name: times_key(name, pattern) for name in backends}
    return {name: layer.us[filed] for name, filed in keys.items() if filed in layer.us}


def _is_comparable(times: Mapping[str, object], libraries: Mapping[str, str]) -> bool:
    """Return whether there is a packed time, and a dense one if dense is compared."""
    return bool(times.keys() - {DENSE_FORM}) and (DENSE_FORM in times or DENSE_FORM not in libraries)


def _extended(measured: MeasuredLayer, more: MeasuredLayer) -> MeasuredLayer:
    """Return a layer with the times of another one of its size past its own numbers of tokens."""
    layer, other = measured.layer, more.layer
    past = [i for i, m in enumerate(other.tokens) if not layer.tokens[0] <= m <= layer.tokens[-1]]
    alike = (layer.out, layer.columns) == (other.out, other.columns) and other.us.keys() <= layer.us.keys()
    if not alike or not past:
        return measured
    rest = {
        name: tuple(times[i] if any(layer.us[name]) else None for i in past)  # a form that failed at all M's fails
        for name, times in other.us.items()
    }
    longer = replace(other, tokens=tuple(other.tokens[i] for i in past), us=rest).updated(layer)
    return replace(measured, layer=longer, others=tuple(dict.fromkeys((*measured.others, *more.others))))
