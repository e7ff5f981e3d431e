"""The choice of the backends of a problem, and of the numbers of tokens for each.

An explicit choice is taken, or refused with its reason. ``auto`` runs a weight that is packed dense by the dense
backend. Otherwise the candidates are the accelerated backends that can run the problem, and had no wrong result when
such a layer was measured here. The times of a layer of the same type (gemm/speed.py) decide: of the same size and
measured here, else a prior, of nearly the same size, another driver, other libraries or another GPU of this compute
capability. The reason, which ``slidesparse inspect`` prints, names the differences:

* ``fallback="fastest"``: the packed form that is the fastest over all numbers of tokens runs, except where another one,
  or the dense weight, is faster by a margin (gemm/time_model.py); all forms that run are kept. Without a measured layer
  the dense weight runs alone.
* ``fallback="dense"``, the default: the same, but a dense copy of packed weights, which doubles the layer's memory, is
  kept only where they take much longer than dense.
* A weight of six bits that is not slid has one form with either: six bits, or eight where these do not gain on average.
* ``fallback="none"``: one packed form runs alone, the fastest over all numbers of tokens, else that of the first
  backend that can run, else the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, get_args

import torch

from slidesparse.base.arguments import shown
from slidesparse.base.device import driver_version
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.ampere.backend import Ampere, AmpereSixBits
from slidesparse.gemm.backend import Backend, Problem
from slidesparse.gemm.cusparselt.backend import CuSparseLt
from slidesparse.gemm.dense import Dense
from slidesparse.gemm.grouped import GroupedProduct
from slidesparse.gemm.hopper.backend import Hopper, HopperSixBits
from slidesparse.gemm.hopper.grouped import HopperExperts
from slidesparse.gemm.reference import Reference
from slidesparse.gemm.spec import Route
from slidesparse.gemm.speed import (
    Installation,
    LayerSpeed,
    MeasuredLayer,
    WrongForm,
    find_nearest,
    is_wrong,
    times_key,
)
from slidesparse.gemm.speed_files import tables_for
from slidesparse.gemm.time_model import explain, fastest, lean_routes_of, one_route_of, routes_of
from slidesparse.weights.quant import dtype_name

Fallback = Literal["dense", "fastest", "none"]
"""The rule of ``auto`` where sparsity does not pay; see the top of this file."""

FALLBACKS: tuple[Fallback, ...] = get_args(Fallback)

BACKENDS: dict[str, Callable[[], Backend]] = {
    "reference": Reference,
    "dense": Dense,
    "hopper": Hopper,
    "hopper-6bit": HopperSixBits,
    "cusparselt": CuSparseLt,
    "ampere": Ampere,
    "ampere-6bit": AmpereSixBits,
}
"""Name -> constructor, in ``auto``'s order of the accelerated ones."""

OF_EIGHT_BITS = {"hopper-6bit": "hopper", "ampere-6bit": "ampere"}
"""Backend for values of six bits -> the one for eight that runs in the same way."""

NO_RIGHT_RESULT = "no packed form that was measured gave a right result here"
WRONG_HERE = "its result was wrong when it was measured here"
NOTHING_SLID = "this weight is packed dense"
NO_COPY = "; no dense copy is kept"
NOT_MEASURED = "no layer like it has been measured on this GPU (slidesparse tune does)"
"""Reason for a GPU without a prior where measuring is off, failed, or took too long."""


@dataclass(frozen=True)
class Choice:
    """The backends of a problem, and the reason.

    Attributes:
        routes: The backend from each number of tokens on; the first from 0.
        reason: The reason, in one sentence.
        measured: The times that decided, of the layer nearest in size; None without any.
        able: The first accelerated backend that can run it, and had no wrong result here; None without one, or where
            none was considered.
        here: The M's of these times that were measured here; the others are a prior's.
    """

    routes: tuple[Route, ...]
    reason: str
    measured: LayerSpeed | None = field(default=None, compare=False, repr=False)
    able: str | None = field(default=None, compare=False, repr=False)
    here: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends of all routes, each once."""
        return tuple(dict.fromkeys(route.backend for route in self.routes))

    def at(self, tokens: int) -> str:
        """Return the backend for M tokens."""
        return next(route.backend for route in reversed(self.routes) if route.from_tokens <= tokens)

    def describe(self) -> str:
        """Return the routes in words: ``dense up to 69 tokens, fast up to 1154, slow beyond``."""
        ends = [f"up to {after.from_tokens - 1}" for after in self.routes[1:]]
        parts = [f"{route.backend} {end}" for route, end in zip(self.routes, [*ends, "beyond"], strict=True)]
        if len(parts) == 1:
            return f"{self.routes[0].backend} for any number of tokens"
        parts[0] += " tokens"
        return ", ".join(parts)

    def times(self, out: int, columns: int) -> dict[int, tuple[float, float, bool]]:
        """Return M -> microseconds of a layer of a size, and of dense, and whether they were measured here."""
        layer = None if self.measured is None else self.measured.of_size(out, columns)
        pairs = {m: (layer.at(self.at(m), m), layer.at("dense", m)) for m in layer.tokens} if layer else {}
        return {m: (ours, dense, m in self.here) for m, (ours, dense) in pairs.items() if ours and dense}


def get_backend(name: str) -> Backend:
    """Return the backend of that name.

    Raises:
        InputError: The name is unknown.
    """
    if not isinstance(name, str) or name not in BACKENDS:
        raise InputError("unknown backend", got=shown(name), needed=f"auto or one of {', '.join(BACKENDS)}")
    return _made(BACKENDS[name])


@lru_cache(maxsize=64)
def _made(constructor: Callable[[], Backend]) -> Backend:
    """Return the only instance of a backend, which has no state and is looked up in every call."""
    return constructor()


def choose(problem: Problem, backend: str = "auto", fallback: Fallback = "dense") -> Choice:
    """Choose backends by the rule at the top of this file.

    Raises:
        InputError: Unknown backend or fallback.
        UnsupportedError: The named backend cannot run the problem, with the reason.
    """
    check_fallback(fallback)
    if not isinstance(backend, str) or backend != "auto":
        reason = get_backend(backend).why_not(problem)
        if reason is not None:
            raise UnsupportedError(f"backend {backend} cannot run this layer: {reason}", remedy="use backend='auto'")
        return _only(backend, "asked for")
    if not problem.has_forms:
        return _only("dense", NOTHING_SLID)
    answers = _ask_accelerated(problem)
    able = [name for name, why_not in answers.items() if why_not is None]
    refusals = "; ".join(f"{name}: {why_not}" for name, why_not in answers.items() if why_not is not None)
    if not able:
        if not problem.slid:
            return _only("dense", NOTHING_SLID)
        return _only("reference" if fallback == "none" else "dense", refusals or "no accelerated backend is known")
    measured = find_measured(problem, able if fallback == "none" else ["dense", *able])
    if measured is None:
        return _only(able[0] if fallback == "none" else "dense", NOT_MEASURED, able[0])
    if fallback != "none":
        quickest = routes_of(measured.layer) if problem.slid else one_route_of(measured.layer)
        routes = lean_routes_of(measured.layer) if problem.slid and fallback == "dense" else quickest
        reason = f"{explain(measured.layer)}; {measured.describe()}" + ("" if routes == quickest else NO_COPY)
        return Choice(routes, reason, measured.layer, able[0], measured.here)
    name = fastest(measured.layer)
    if name is not None:
        return _only(name, measured.describe(), able[0])
    return _only(next((name for name in able if name not in measured.layer.us), "reference"), NO_RIGHT_RESULT, able[0])


def backends_to_compare(problem: Problem, backend: str = "auto", fallback: Fallback = "dense") -> list[str]:
    """Return the backends whose times decide, dense first; none where :func:`choose` needs no times."""
    check_fallback(fallback)
    if backend != "auto" or not problem.has_forms or not can_be_timed(problem.device):
        return []
    able = [name for name, why_not in _ask_accelerated(problem).items() if why_not is None]
    return ["dense", *able] if len(able) > (fallback == "none") else []


def check_fallback(value: object) -> None:
    """Raise an InputError for anything but the values of :data:`Fallback`."""
    if not isinstance(value, str) or value not in FALLBACKS:
        raise InputError("unknown fallback", got=shown(value), needed="dense, fastest or none")


def _ask_accelerated(problem: Problem) -> dict[str, str | None]:
    """Return accelerated backend -> the reason why it may not run a problem; None if it may."""
    known = [
        backend
        for backend in map(get_backend, BACKENDS)
        if backend.accelerated and backend.bits in (None, problem.bits)
    ]
    answers = {backend.name: backend.why_not(problem) for backend in known}
    able = [name for name, why_not in answers.items() if why_not is None]
    wrong = wrong_among(able, problem)
    answers |= dict.fromkeys(wrong, WRONG_HERE)
    able = [name for name in able if name not in wrong]
    for backend in known:
        faster = backend.yields_to(problem)
        if answers[backend.name] is None and faster is not None and faster[0] in able:
            answers[backend.name] = faster[1]
    return answers


def wrong_among(names: Sequence[str], problem: Problem) -> list[str]:
    """Return the backends with a wrong result when such a problem was measured here."""
    if not names or not can_be_timed(problem.device):
        return []
    here = installation(problem.device)
    tables = [table for table in tables_for(here) if table.wrong]
    return [name for name in names if is_wrong(tables, here, name, wrong_form(problem, name))]


def wrong_form(problem: Problem, backend: str) -> WrongForm:
    """Return the entry of a wrong backend for a problem in a file."""
    name = times_key(backend, str(problem.pattern))
    return WrongForm(dtype_name(problem.dtype), problem.out_features, problem.in_features, name, problem.experts)


def _only(backend: str, reason: str, able: str | None = None) -> Choice:
    return Choice((Route(0, backend),), reason, able=able)


def find_measured(problem: Problem, names: Sequence[str]) -> MeasuredLayer | None:
    """Return the measured layer that decides between backends for a problem on a GPU; None without one.

    Times of eight bits are a prior for six, which take fewer bytes.
    """
    if not can_be_timed(problem.device):
        return None
    here = installation(problem.device)
    compared = replace(here, libraries={name: here.libraries[name] for name in names})
    sizes = problem.out_features, problem.in_features
    layer = dtype_name(problem.dtype), str(problem.pattern), *sizes, problem.experts
    nearest = find_nearest(tables_for(here), compared, *layer)
    if nearest is not None or problem.bits != 6:
        return nearest
    experts = None if problem.experts is None else replace(problem.experts, bits=8)
    names_of_eight = {name: OF_EIGHT_BITS.get(name, name) for name in names}
    eight = find_measured(replace(problem, bits=8, experts=experts), list(names_of_eight.values()))
    return None if eight is None else eight.as_prior({of_eight: name for name, of_eight in names_of_eight.items()})


def grouped_product(problem: Problem) -> GroupedProduct | str:
    """Return the grouped product for experts, on a CPU the definition; or the reason why none runs on this GPU.

    ``problem`` is that of one expert's weight.
    """
    if problem.device.type == "cpu":
        return GroupedProduct()
    reason = (Hopper() if problem.slid else HopperSixBits()).why_not(problem)
    return HopperExperts() if reason is None else f"the grouped product cannot run them: {reason}"


def can_be_timed(device: torch.device) -> bool:
    """Return whether layers on a device are measured and chosen by times."""
    return device.type == "cuda"


def installation(device: torch.device | None = None) -> Installation:
    """Return the installation of a CUDA device; None: of the current one."""
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return Installation(torch.cuda.get_device_name(device), capability, driver_version(), libraries())


def libraries() -> dict[str, str]:
    """Return backend of ``auto`` -> its library, of those that are installed."""
    installed = {}
    for backend in map(get_backend, BACKENDS):
        if backend.name == "dense" or backend.accelerated:
            with suppress(UnsupportedError):
                installed[backend.name] = backend.library()
    return installed
