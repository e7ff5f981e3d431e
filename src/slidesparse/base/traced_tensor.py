"""Tensors without values that remember how they were computed, so that the computation can be done again with values.

A loader that renames, stacks, cuts and joins tensors is run once with such tensors. What it leaves in a model then says
which tensors fill which parameter, and how. Everything here is torch's public protocol for subclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Union

import torch

Recipe = Union[str, "Step"]
"""The name of a tensor, or the last step of a computation."""


@dataclass(frozen=True)
class Step:
    """A call of a torch function.

    Attributes:
        function: The function.
        args: Its arguments, with recipes in the places of tensors.
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
    """A tensor on the meta device with a recipe; every torch function of such tensors returns such tensors."""

    recipe: Recipe

    @classmethod
    def named(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> TracedTensor:
        """Make a tensor that is not computed but has a name."""
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        made.recipe = name
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and note the call in what it returns."""
        kwargs = kwargs or {}
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        recipe = getattr(first, "recipe", None)
        if recipe is not None and (name == "to" or func == torch.Tensor.data.__set__):  # type: ignore[attr-defined]
            return first  # there are no values to move, to round or to set
        out = super().__torch_function__(func, types, args, kwargs)
        whole = name == "__getitem__" and args[1] is Ellipsis
        if recipe is not None and (name in KEEPS_VALUES or whole or func == torch.Tensor.data.__get__):  # type: ignore[attr-defined]
            return _noted(out, recipe)
        step = Step(func, _recipes(args), _recipes(kwargs))
        if isinstance(out, (tuple, list)) and any(isinstance(one, TracedTensor) for one in out):
            parts = (_noted(one, Step(step.function, step.args, step.kwargs, i)) for i, one in enumerate(out))
            return tuple(parts)
        return _noted(out, step)


def _noted(value: Any, recipe: Recipe) -> Any:
    if isinstance(value, TracedTensor):
        value.recipe = recipe
    return value


def _recipes(value: Any) -> Any:
    """Return arguments with the recipes of tensors in their places."""
    if isinstance(value, TracedTensor):
        return _Place(value.recipe)
    if isinstance(value, dict):
        return {key: _recipes(one) for key, one in value.items()}
    return type(value)(map(_recipes, value)) if type(value) in (tuple, list) else value


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor among arguments, which may be strings themselves."""

    recipe: Recipe


def recipe_of(tensor: torch.Tensor) -> Recipe | None:
    """Return how a tensor was computed; None for one that was not traced."""
    return getattr(tensor, "recipe", None)


def sources(recipe: Recipe) -> list[str]:
    """Return the names of the tensors from which a recipe computes, each once, in their order."""
    return list(dict.fromkeys(_sources(recipe)))


def _sources(recipe: Recipe) -> Iterator[str]:
    if isinstance(recipe, str):
        yield recipe
    else:
        for place in _places((recipe.args, recipe.kwargs)):
            yield from _sources(place.recipe)


def _places(value: Any) -> Iterator[_Place]:
    if isinstance(value, _Place):
        yield value
    elif isinstance(value, dict):
        yield from _places(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _places(one)


def replay(recipe: Recipe, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Compute what a recipe says, with the values of the named tensors.

    Args:
        recipe: From :func:`recipe_of`.
        read: Name of a tensor -> the tensor.
    """
    if isinstance(recipe, str):
        return read(recipe)

    def filled(value: Any) -> Any:
        if isinstance(value, _Place):
            return replay(value.recipe, read)
        if isinstance(value, dict):
            return {key: filled(one) for key, one in value.items()}
        return type(value)(map(filled, value)) if type(value) in (tuple, list) else value

    out = recipe.function(*filled(recipe.args), **filled(recipe.kwargs))
    result: torch.Tensor = out if recipe.index is None else out[recipe.index]
    return result
