"""Which backend runs a problem.

The rule, in full: an explicit choice is taken or refused with its reason. ``auto`` takes the first accelerated backend
that can run the problem and is known to be faster than dense there; where there is none, the dense weight runs
(``fallback="dense"``), or the first backend that can run the packed weight alone (``fallback="none"``). A choice has a
reason; ``slidesparse info`` prints what each backend answers. None has a measured table yet: see UNPROVEN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.base import Backend, Problem
from slidesparse.gemm.cusparselt import CuSparseLt
from slidesparse.gemm.dense import Dense
from slidesparse.gemm.hopper import Hopper
from slidesparse.gemm.reference import Reference

Fallback = Literal["dense", "none"]

BACKENDS: dict[str, Callable[[], Backend]] = {
    "reference": Reference,
    "dense": Dense,
    "hopper": Hopper,
    "cusparselt": CuSparseLt,
    "cusparselt-bf16": lambda: CuSparseLt(intermediate="bf16"),
}
"""Name -> constructor, in the order in which ``auto`` tries the accelerated ones."""

UNPROVEN = "can run, but is not known to be faster than dense here; ask for it by name"
"""Until a measured table says where a backend wins, ``auto`` does not claim that it does."""


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
    answers = {name: get_backend(name).why_not(problem) for name in BACKENDS if get_backend(name).accelerated}
    able = [name for name, why_not in answers.items() if why_not is None]
    if fallback == "none":
        if able:
            return Choice(get_backend(able[0]), "the first that can run the packed weight alone")
        return Choice(get_backend("reference"), "; ".join(f"{name}: {why_not}" for name, why_not in answers.items()))
    reasons = [f"{name}: {why_not or UNPROVEN}" for name, why_not in answers.items()]
    return Choice(get_backend("dense"), "; ".join(reasons))
