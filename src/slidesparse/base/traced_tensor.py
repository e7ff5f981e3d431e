"""Tensors without values that remember how they were computed, so that the computation can be done again with values.

A loader that renames, stacks, cuts and joins tensors is run once with such tensors. What it leaves in a model then says
which tensors fill which parameter, and how. Everything here is torch's public protocol for subclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Union

import torch

Origin = Union[str, "Computation"]
"""The name of a tensor, or the last step of a computation."""


@dataclass(frozen=True)
class Computation:
    """A call of a torch function.

    Attributes:
        function: The function.
        args: Its arguments, with origins in the places of tensors.
        kwargs: Its keyword arguments, likewise.
        index: Which of its results, where it returns several.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None = None


KEEPS_VALUES = {"to", "cpu", "cuda", "float", "half", "bfloat16", "contiguous", "clone", "detach", "requires_grad_"}
"""Methods that leave the elements as they are, but for their type and place, which whoever reads them chooses."""


class TracedTensor(torch.Tensor):
    """A tensor on the meta device with an origin; every torch function of such tensors returns such tensors."""

    origin: Origin

    @classmethod
    def named(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> TracedTensor:
        """Make a tensor that is not computed but has a name."""
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        made.origin = name
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and note the call in what it returns."""
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


def _origins(value: Any) -> Any:
    """Return arguments with the origins of tensors in their places."""
    if isinstance(value, TracedTensor):
        return _Place(value.origin)
    if isinstance(value, dict):
        return {key: _origins(one) for key, one in value.items()}
    return type(value)(map(_origins, value)) if type(value) in (tuple, list) else value


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor among arguments, which may be strings themselves."""

    origin: Origin


def origin_of(tensor: torch.Tensor) -> Origin | None:
    """Return how a tensor was computed; None for one that was not traced."""
    return getattr(tensor, "origin", None)


def sources(origin: Origin) -> list[str]:
    """Return the names of the tensors from which an origin computes, each once, in their order."""
    return list(dict.fromkeys(_sources(origin)))


def _sources(origin: Origin) -> Iterator[str]:
    if isinstance(origin, str):
        yield origin
    else:
        for place in _places((origin.args, origin.kwargs)):
            yield from _sources(place.origin)


def _places(value: Any) -> Iterator[_Place]:
    if isinstance(value, _Place):
        yield value
    elif isinstance(value, dict):
        yield from _places(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _places(one)


def origins_of(step: Computation) -> list[Origin]:
    """Return the origins of the tensors from which a computation computes, in their order."""
    return [place.origin for place in _places((step.args, step.kwargs))]


def replay(origin: Origin, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Compute what an origin says, with the values of the named tensors.

    Args:
        origin: From :func:`origin_of`.
        read: Name of a tensor -> the tensor.
    """
    if isinstance(origin, str):
        return read(origin)

    def filled(value: Any) -> Any:
        if isinstance(value, _Place):
            return replay(value.origin, read)
        if isinstance(value, dict):
            return {key: filled(one) for key, one in value.items()}
        return type(value)(map(filled, value)) if type(value) in (tuple, list) else value

    out = origin.function(*filled(origin.args), **filled(origin.kwargs))
    result: torch.Tensor = out if origin.index is None else out[origin.index]
    return result
