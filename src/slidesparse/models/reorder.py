"""Put the inner channels of an MLP into an order in which patterns take less away; it computes what it did.

Between the linears that write inner channels (gate and up, or the first of two) and the one that reads them (down) is
nothing but a function of each channel. So rows of the writers and columns of the reader may change places together.
Which linears do is tried out: where other outputs of a layer do not stay the same when its channels are shuffled, it is
left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slidesparse.models.channel_order import better_order
from slidesparse.models.hooks import hooked
from slidesparse.models.targets import input_sets

LARGEST_CHANGE = 0.02
"""Norm of the change of a linear's outputs over their norm, when channels are shuffled. Other orders of sums change
them by less than a hundredth in BF16; channels that do not belong together change them by about their size."""


@dataclass(frozen=True)
class Inner:
    """Channels that only some linears write, and only one reads.

    Attributes:
        writers: Linears that read one input, with a row for each channel; or one that joins two such, half after half.
        reader: The linear with a column for each.
    """

    writers: tuple[str, ...]
    reader: str


def find_inner(linears: dict[str, nn.Linear], model: nn.Module, run: Callable[[], object]) -> list[Inner]:
    """Return what may be inner channels, as far as shapes tell: each reader with the nearest writers before it.

    Args:
        linears: Those that may be reordered, in the model's order.
        model: May be on the meta device.
        run: Runs the model once, on any input.
    """
    sets = input_sets(model, linears, run)
    place = {name: number for number, name in enumerate(linears)}
    return [inner for name in linears if (inner := _nearest(name, linears, sets, place)) is not None]


def _nearest(
    reader: str, linears: dict[str, nn.Linear], sets: Sequence[Sequence[str]], place: dict[str, int]
) -> Inner | None:
    channels = linears[reader].in_features
    fitting = [
        tuple(names)
        for names in sets
        if place[names[-1]] < place[reader]
        and (
            all(linears[name].out_features == channels for name in names)
            or [linears[name].out_features for name in names] == [2 * channels]
        )
    ]
    return Inner(max(fitting, key=lambda names: place[names[0]]), reader) if fitting else None


@torch.no_grad()
def can_change_places(layer: nn.Module, modules: dict[str, Any], inner: Inner, run: Callable[[], object]) -> bool:
    """Say whether a layer computes the same with these channels in any other order.

    Args:
        layer: The layer.
        modules: Name -> linear of the layer; parameters are changed and put back.
        inner: The channels.
        run: Runs the layer.
    """
    writers, reader = [modules[name] for name in inner.writers], modules[inner.reader]
    others = [m for m in layer.modules() if isinstance(m, nn.Linear) and not any(m is writer for writer in writers)]
    before = _outputs(others, run)
    order = torch.randperm(reader.in_features, generator=torch.Generator().manual_seed(0)).to(reader.weight.device)
    kept = [(parameter, parameter.data) for module in (*writers, reader) for parameter in module.parameters()]
    reader.weight.data = reader.weight.data[:, order]
    for writer in writers:
        for parameter in writer.parameters():
            parameter.data = parameter.data[rows_in(order, len(parameter))]
    try:
        after = _outputs(others, run)
    finally:
        for parameter, data in kept:
            parameter.data = data
    return all(bool((x - y).norm() <= LARGEST_CHANGE * x.norm()) for x, y in zip(before, after, strict=True))


def rows_in(order: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the order of a writer's rows, int64 [rows]: that of the channels, in each half where it joins two."""
    return torch.cat([order + start for start in range(0, rows, len(order))])


def _outputs(linears: Sequence[nn.Linear], run: Callable[[], object]) -> list[torch.Tensor]:
    """Run, and return what linears give, float32, in the order of their calls; Llama 4's routers give several."""
    found: list[torch.Tensor] = []

    def see(_: nn.Module, args: object, out: Any) -> None:
        found.extend(one.to(torch.float32) for one in (out if isinstance(out, tuple) else (out,)))

    with hooked(one.register_forward_hook(see) for one in linears):
        run()
    return found


@torch.no_grad()
def orders(
    modules: dict[str, Any], inner: Sequence[Inner], groups: dict[str, int], squares: dict[str, torch.Tensor], seed: int
) -> Iterator[tuple[Inner, torch.Tensor]]:
    """Return the order of each inner channel's places, int64 [channels].

    Args:
        modules: Name -> linear.
        inner: The channels.
        groups: Reader -> columns of a group of its pattern.
        squares: Reader -> the sum of squares of each of its inputs, float32 [channels].
        seed: Of the search.
    """
    for one in inner:
        scores = modules[one.reader].weight.to(torch.float32) ** 2 * squares[one.reader]
        yield one, better_order(scores, groups[one.reader], seed)
