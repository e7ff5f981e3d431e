"""Which backend runs a problem.

The rule, in full: an explicit choice is taken or refused with its reason. ``auto`` takes the first accelerated backend
that can run the problem; where none can, the dense weight runs (``fallback="dense"``), or the reference on the packed
one (``fallback="none"``). A choice carries its reason; ``slidesparse info`` prints what each backend answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.base import Backend, Problem
from slidesparse.gemm.cusparselt import CuSparseLt
from slidesparse.gemm.dense import Dense
from slidesparse.gemm.reference import Reference

Fallback = Literal["dense", "none"]

BACKENDS: dict[str, Callable[[], Backend]] = {
    "reference": Reference,
    "dense": Dense,
    "cusparselt": CuSparseLt,
    "cusparselt-bf16": lambda: CuSparseLt(intermediate="bf16"),
}
"""Name -> constructor, in the order in which ``auto`` tries the accelerated ones."""


@dataclass(frozen=True)
class Choice:
    """A backend and why it was chosen, in one sentence."""

    backend: Backend
    reason: str


def get_backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        InputError: Listing the known names.
    """
    if name not in BACKENDS:
        raise InputError("unknown backend", got=repr(name), needed=f"auto or one of {', '.join(BACKENDS)}")
    return BACKENDS[name]()


def choose(problem: Problem, backend: str = "auto", fallback: Fallback = "dense") -> Choice:
    """Choose a backend by the rule at the top of this file.

    Raises:
        InputError: Unknown backend or fallback.
        UnsupportedError: The backend asked for cannot run the problem; the message says why.
    """
    if fallback not in ("dense", "none"):
        raise InputError("unknown fallback", got=repr(fallback), needed="dense or none")
    if backend != "auto":
        chosen = get_backend(backend)
        reason = chosen.why_not(problem)
        if reason is not None:
            raise UnsupportedError(f"backend {backend} cannot run this layer", got=reason, remedy="use backend='auto'")
        return Choice(chosen, "asked for")
    refusals = []
    for name in BACKENDS:
        candidate = get_backend(name)
        if not candidate.accelerated:
            continue
        reason = candidate.why_not(problem)
        if reason is None:
            return Choice(candidate, "the first accelerated backend that can run it")
        refusals.append(f"{name}: {reason}")
    why = "; ".join(refusals) or "this version has no accelerated backend"
    return Choice(get_backend("dense" if fallback == "dense" else "reference"), why)
