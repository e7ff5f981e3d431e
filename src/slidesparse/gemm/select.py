"""The choice of the backends of a problem, and of the numbers of tokens for each.

An explicit choice is taken, or refused with its reason. ``auto`` runs a dense weight by the dense backend, unless it
has six bits, or is INT8 on a GPU for which servers have no such kernel. Otherwise the candidates are the accelerated
backends that can run the problem, and had no wrong result when such a layer was measured here. Its times here
(gemm/speed.py) decide:

* ``fallback="fastest"``: the packed form that is the fastest over all numbers of tokens runs, except where another one,
  or the dense weight, is faster by a margin (gemm/time_model.py); all forms that run are kept. A layer that was not
  measured runs dense, but for those of :func:`_gains_unmeasured`.
* ``fallback="dense"``, the default: the same, but another form, packed or dense, which doubles the layer's memory, is
  kept only where the fastest packed one takes much longer than dense.
* A weight that is not slid has one form with either: that of a kernel of ours, or its rows where that does not gain on
  average.
* ``fallback="none"``: one packed form runs alone, the fastest over all numbers of tokens, else that of the first
  backend that can run, else the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, get_args

import torch

from slidesparse.base.arguments import shown
from slidesparse.base.device import driver_version
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.ampere.backend import Ampere, AmpereSixBits
from slidesparse.gemm.backend import Backend, Problem, servers_lack
from slidesparse.gemm.cusparselt.backend import CuSparseLt
from slidesparse.gemm.dense import Dense
from slidesparse.gemm.grouped import GroupedProduct
from slidesparse.gemm.hopper.backend import Hopper, HopperSixBits
from slidesparse.gemm.hopper.grouped import HopperExperts
from slidesparse.gemm.reference import Reference
from slidesparse.gemm.spec import Route
from slidesparse.gemm.speed import MEASURED_HERE, Installation, LayerSpeed, WrongForm, find_times, times_key
from slidesparse.gemm.speed_files import table_of
from slidesparse.gemm.time_model import explain, fastest, lean_routes_of, one_route_of, routes_of
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import QUANTISED, dtype_name

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

NO_RIGHT_RESULT = "no packed form that was measured gave a right result here"
WRONG_HERE = "its result was wrong when it was measured here"
NOTHING_SLID = "this weight is packed dense"
NO_COPY = "; no dense copy is kept"
NOT_MEASURED = "no layer like it has been measured on this GPU"
"""Reason where measuring is off, failed, or took too long."""


@dataclass(frozen=True)
class Choice:
    """The backends of a problem, and the reason.

    Attributes:
        routes: The backend from each number of tokens on; the first from 0.
        reason: The reason, in one sentence.
        measured: The times that decided; None without any.
        able: The first accelerated backend that can run it, and had no wrong result here; None without one, or where
            none was considered.
    """

    routes: tuple[Route, ...]
    reason: str
    measured: LayerSpeed | None = field(default=None, compare=False, repr=False)
    able: str | None = field(default=None, compare=False, repr=False)

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends of all routes, each once."""
        return tuple(dict.fromkeys(route.backend for route in self.routes))

    def at(self, tokens: int) -> str:
        """Return the backend for M tokens."""
        return next(route.backend for route in reversed(self.routes) if route.from_tokens <= tokens)

    def describe(self) -> str:
        """Return the routes in words: ``dense up to 64 tokens, fast up to 1024, slow beyond``."""
        ends = [f"up to {after.from_tokens - 1}" for after in self.routes[1:]]
        parts = [f"{route.backend} {end}" for route, end in zip(self.routes, [*ends, "beyond"], strict=True)]
        if len(parts) == 1:
            return f"{self.routes[0].backend} for any number of tokens"
        parts[0] += " tokens"
        return ", ".join(parts)

    @property
    def times(self) -> dict[int, tuple[float, float]]:
        """M -> microseconds of the layer, and of dense."""
        layer = self.measured
        pairs = {m: (layer.at(self.at(m), m), layer.at("dense", m)) for m in layer.tokens} if layer else {}
        return {m: (ours, dense) for m, (ours, dense) in pairs.items() if ours and dense}


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
        alone = "reference" if problem.slid and fallback == "none" else "dense"
        return _only(alone, refusals or "no accelerated backend is known")
    layer = find_measured(problem, able if fallback == "none" else ["dense", *able])
    if layer is None:
        packed = fallback == "none" or _gains_unmeasured(able[0], problem)
        return _only(able[0] if packed else "dense", NOT_MEASURED, able[0])
    if fallback != "none":
        quickest = routes_of(layer) if problem.slid else one_route_of(layer)
        routes = lean_routes_of(layer) if problem.slid and fallback == "dense" else quickest
        reason = f"{explain(layer)}; {MEASURED_HERE}" + ("" if routes == quickest else NO_COPY)
        return Choice(routes, reason, layer, able[0])
    name = fastest(layer)
    if name is not None:
        return _only(name, MEASURED_HERE, able[0])
    return _only("reference", NO_RIGHT_RESULT, able[0])


def _gains_unmeasured(backend: str, problem: Problem) -> bool:
    """Return whether a packed weight gains in all likelihood: 8 bits at 6:8 or sparser on Hopper, INT8 on Blackwell.

    On an H100 and an H200 dense copies were worth their memory in none of such layers (results/h100/layers.json,
    results/h200/layers.json). On Blackwell the only dense INT8 kernel is torch's, without fused scales; a slid
    weight runs by cuSPARSELt where NVIDIA lists the card, since nobody has run ``ampere`` there.
    """
    if servers_lack(problem.dtype, problem.device):
        return True
    gains = problem.slid and problem.dtype in QUANTISED and problem.pattern.ideal_speedup >= Pattern(6, 8).ideal_speedup
    return gains and backend.startswith("hopper")


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
    wrong = table_of(installation(problem.device)).wrong
    return [name for name in names if wrong_form(problem, name) in wrong]


def wrong_form(problem: Problem, backend: str) -> WrongForm:
    """Return the entry of a wrong backend for a problem in a file."""
    name = times_key(backend, str(problem.pattern))
    return WrongForm(dtype_name(problem.dtype), problem.out_features, problem.in_features, name, problem.experts)


def _only(backend: str, reason: str, able: str | None = None) -> Choice:
    return Choice((Route(0, backend),), reason, able=able)


def find_measured(problem: Problem, names: Sequence[str]) -> LayerSpeed | None:
    """Return the times here that decide between backends for a problem; None without any."""
    if not can_be_timed(problem.device):
        return None
    kind = dtype_name(problem.dtype), str(problem.pattern), problem.out_features, problem.in_features, problem.experts
    return find_times(table_of(installation(problem.device)), names, *kind)


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
