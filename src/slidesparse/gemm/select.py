"""Choose the backends that run a problem, and the numbers of tokens for each.

The rule, in full. An explicit choice is taken, or refused with its reason. ``auto`` runs a weight without slid groups
(a shard of a partial pattern may be one) dense: its packed form has nothing to gain. Otherwise it asks which
accelerated backends can run the problem, then looks for a layer of the same type and nearly the same size that was
measured on this GPU (gemm/speed.py). Times measured with other versions of the libraries are used where there are no
better ones, and the reason names both versions:

* ``fallback="dense"``: the dense weight runs, except for the numbers of tokens at which a packed form was measured
  faster; both are kept then. Without such a measured layer the dense weight runs alone.
* ``fallback="none"``: one packed form alone runs, that of the backend measured fastest over all numbers of tokens, else
  of the first that can run, else of the reference.

A choice has a reason; ``slidesparse inspect`` prints both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch

from slidesparse.base.arguments import shown
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.backend import Backend, Problem
from slidesparse.gemm.cusparselt.backend import CuSparseLt
from slidesparse.gemm.dense import Dense
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.reference import Reference
from slidesparse.gemm.spec import Route, describe_routes
from slidesparse.gemm.speed import LayerSpeed, MeasuredLayer, fastest, find_nearest, switching, tables_for
from slidesparse.quant import dtype_name

Fallback = Literal["dense", "none"]

BACKENDS: dict[str, Callable[[], Backend]] = {
    "reference": Reference,
    "dense": Dense,
    "hopper": Hopper,
    "cusparselt": CuSparseLt,
    "cusparselt-bf16": lambda: CuSparseLt(intermediate="bf16"),
}
"""Name -> constructor, in the order in which ``auto`` tries the accelerated ones."""

NOTHING_SLID = "no group of this weight is slid"
NOT_MEASURED = "no layer like it has been measured on this GPU (slidesparse tune does)"


@dataclass(frozen=True)
class Choice:
    """The backends that run a problem, and why.

    Attributes:
        routes: The backend from each number of tokens on; the first from 0.
        reason: The reason, in one sentence.
        measured: The times that decided, of the layer nearest in size; None where something else did.
    """

    routes: tuple[Route, ...]
    reason: str
    measured: LayerSpeed | None = field(default=None, compare=False, repr=False)

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends whose forms of the weight are kept, each once."""
        return tuple(dict.fromkeys(route.backend for route in self.routes))

    def at(self, tokens: int) -> str:
        """Return the backend that runs M tokens."""
        return next(route.backend for route in reversed(self.routes) if route.from_tokens <= tokens)

    def describe(self) -> str:
        """Return the routes in words: ``dense up to 4095 tokens, cusparselt beyond``."""
        return describe_routes(self.routes)


def get_backend(name: str) -> Backend:
    """Return the backend of that name.

    Raises:
        InputError: Listing the known names.
    """
    if not isinstance(name, str) or name not in BACKENDS:
        raise InputError("unknown backend", got=shown(name), needed=f"auto or one of {', '.join(BACKENDS)}")
    return _made(BACKENDS[name])


@lru_cache(maxsize=64)
def _made(constructor: Callable[[], Backend]) -> Backend:
    """Return the one instance of a backend: it has no state, and operators ask for it on every call."""
    return constructor()


def choose(problem: Problem, backend: str = "auto", fallback: Fallback = "dense") -> Choice:
    """Choose backends by the rule at the top of this file.

    Raises:
        InputError: Unknown backend or fallback.
        UnsupportedError: The backend asked for cannot run the problem; the message says why.
    """
    if not isinstance(fallback, str) or fallback not in ("dense", "none"):
        raise InputError("unknown fallback", got=shown(fallback), needed="dense or none")
    if not isinstance(backend, str) or backend != "auto":
        reason = get_backend(backend).why_not(problem)
        if reason is not None:
            raise UnsupportedError(f"backend {backend} cannot run this layer: {reason}", remedy="use backend='auto'")
        return _only(backend, "asked for")
    if not problem.slid:
        return _only("dense", NOTHING_SLID)
    accelerated = [candidate for name in BACKENDS if (candidate := get_backend(name)).accelerated]
    answers = {candidate.name: candidate.why_not(problem) for candidate in accelerated}
    able = [name for name, why_not in answers.items() if why_not is None]
    refusals = "; ".join(f"{name}: {why_not}" for name, why_not in answers.items() if why_not is not None)
    if not able:
        return _only("dense" if fallback == "dense" else "reference", refusals or "no accelerated backend is known")
    names = ["dense", *able] if fallback == "dense" else able
    measured = _measured(problem, names)
    if measured is None:
        return _only("dense" if fallback == "dense" else able[0], NOT_MEASURED)
    if fallback == "dense":
        return Choice(switching(measured.layer), measured.describe(), measured.layer)
    name = fastest(measured.layer)
    return _only(able[0], NOT_MEASURED) if name is None else _only(name, measured.describe())


def _only(backend: str, reason: str) -> Choice:
    return Choice((Route(0, backend),), reason)


def _measured(problem: Problem, names: Sequence[str]) -> MeasuredLayer | None:
    """Return the measured layer by which a problem on a GPU is judged; None without one."""
    if problem.device.type != "cuda":
        return None
    tables = tables_for(torch.cuda.get_device_name(problem.device))
    libraries = {name: get_backend(name).library() for name in names}
    size = problem.out_features, problem.in_features
    return find_nearest(tables, libraries, dtype_name(problem.dtype), str(problem.pattern), *size)
