"""Kernels that add up in one order: kept where a model has them, and left where it has not, with a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint

from slidesparse.recovery.networks import DenseNetwork
from slidesparse.recovery.ordered_sums import choose_kernels, ordered_sums

IDS = torch.arange(16)[None]


class Unordered(DenseNetwork):
    """A model with an operator that adds up in any order."""

    def predictions(self, ids: torch.Tensor):  # type: ignore[no-untyped-def]
        raise RuntimeError("histc does not have a deterministic implementation, but you set it")


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return make_checkpoint(tmp_path / "model").float()


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with ordered_sums(torch.device("cpu")):
        yield
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("network", [DenseNetwork, Unordered])
def test_a_model_keeps_to_ordered_sums_if_it_can(
    model: Any, network: type[DenseNetwork], alone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    dense = network(model).requires_grad_(False)
    choose_kernels(dense, IDS, alone)
    ordered = alone and network is DenseNetwork
    assert torch.is_deterministic_algorithms_warn_only_enabled() == (not ordered)
    assert ("other bytes" in caplog.text) == (alone and network is Unordered)
    assert not any(one.requires_grad or one.grad is not None for one in dense.parameters())


def test_another_error_is_not_taken_for_that(model: Any) -> None:
    with pytest.raises(IndexError):
        choose_kernels(DenseNetwork(model), IDS + 10**6, alone=True)
