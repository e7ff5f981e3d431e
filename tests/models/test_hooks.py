"""Hooks are gone when their block ends, whatever ends it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from slidesparse.models.hooks import hooked


def test_hooks_run_inside_the_block_alone() -> None:
    linears, called = [nn.Linear(2, 2), nn.Linear(2, 2)], list[int]()

    def handles() -> Iterator[RemovableHandle]:
        for number, linear in enumerate(linears):
            yield linear.register_forward_hook(lambda *_, number=number: called.append(number))

    def run() -> None:
        for linear in linears:
            linear(torch.zeros(1, 2))

    with hooked(handles()):
        run()
    run()
    assert called == [0, 1]
    with pytest.raises(KeyboardInterrupt), hooked(handles()):
        raise KeyboardInterrupt
    run()
    assert called == [0, 1]


def test_a_hook_that_cannot_be_registered_leaves_none() -> None:
    linear = nn.Linear(2, 2)

    def handles() -> Iterator[RemovableHandle]:
        yield linear.register_forward_hook(lambda *_: pytest.fail("the hook is still there"))
        raise ValueError("no second hook")

    with pytest.raises(ValueError, match="no second hook"), hooked(handles()):
        pytest.fail("the block runs")
    linear(torch.zeros(1, 2))
