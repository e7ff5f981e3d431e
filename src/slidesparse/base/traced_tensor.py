"""Tensors without values that record their computation, which can then be repeated with values.

A loader that renames, stacks, cuts and joins tensors is run once with such tensors. The parameters that it leaves in a
model then tell their sources and their computation. Only torch's public protocol for subclasses is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Union

import torch

Origin = Union[str, "Computation"]
"""The name of a tensor, or the last step of a computation."""


@dataclass(frozen=True)
class Computation:
    """A call of a torch function, with origins in the places of tensors; ``index`` is that of a result of several."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None = None


KEEPS_VALUES = {"to", "cpu", "cuda", "float", "half", "bfloat16", "contiguous", "clone", "detach", "requires_grad_"}
"""Methods that change no element, but only types and devices, which the reader chooses."""


class TracedTensor(torch.Tensor):
    """A tensor on the meta device with an origin; torch functions of such tensors return such tensors."""

    origin: Origin

    @classmethod
    def named(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> TracedTensor:
        """Make a tensor whose origin is a name."""
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        made.origin = name
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and record the call in its results."""
        kwargs = kwargs or {}
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        origin = getattr(first, "origin", None)
        if origin is not None and (name == "to" or func == torch.Tensor.data.__set__):  # type: ignore[attr-defined]
            return first  # there are no values to move, to round or to set
        out = super().__torch_function__(func, types, args, kwargs)
        whole = name == "__getitem__" and args[1] is Ellipsis
        if origin is not None and (name in KEEPS_VALUES or whole or func == torch.Tensor.data.__get__):  # type: ignore[attr-defined]
            return _noted(out, origin)
        step = Computation(func, _origins(args), _origins(kwargs))
        if isinstance(out, (tuple, list)) and any(isinstance(one, TracedTensor) for one in out):
            parts = (_noted(one, Computation(step.function, step.args, step.kwargs, i)) for i, one in enumerate(out))
            return tuple(parts)
        return _noted(out, step)


def _noted(value: Any, origin: Origin) -> Any:
    if isinstance(value, TracedTensor):
        value.origin = origin
    return value


def _mapped(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return arguments with ``function`` applied to each value of a kind."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(one, kind, function) for key, one in value.items()}
    return type(value)(_mapped(one, kind, function) for one in value) if type(value) in (tuple, list) else value


def _origins(value: Any) -> Any:
    return _mapped(value, TracedTensor, lambda tensor: _Place(tensor.origin))


@dataclass(frozen=True)
class _Place:
    """Placeholder for a tensor among arguments, which may be strings themselves."""

    origin: Origin


def origin_of(tensor: torch.Tensor) -> Origin | None:
    """Return the origin of a tensor; None if it was not traced."""
    return getattr(tensor, "origin", None)


def sources(origin: Origin) -> list[str]:
    """Return the names of the tensors that an origin reads, each once, in order."""
    if isinstance(origin, str):
        return [origin]
    return list(dict.fromkeys(name for one in origins_of(origin) for name in sources(one)))


def origins_of(step: Computation) -> list[Origin]:
    """Return the origins of the tensors that a computation reads, in order."""
    places: list[_Place] = []
    _mapped((step.args, step.kwargs), _Place, places.append)
    return [place.origin for place in places]


def replay(origin: Origin, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Repeat the computation of an origin, with the values that ``read`` returns for names."""
    if isinstance(origin, str):
        return read(origin)

    args, kwargs = _mapped((origin.args, origin.kwargs), _Place, lambda place: replay(place.origin, read))
    out = origin.function(*args, **kwargs)
    result: torch.Tensor = out if origin.index is None else out[origin.index]
    return result
