"""What is said of other cards: by info, prune and inspect, and on the page."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slidesparse.gemm import Problem, cards, get_backend, step_backend
from slidesparse.gemm.cards import CARDS, find_card
from slidesparse.gemm.cusparselt import api
from slidesparse.gemm.cusparselt import backend as cusparselt
from slidesparse.weights.pattern import Pattern


def test_cards_are_found_by_what_the_driver_calls_them() -> None:
    cases = [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", None),  # of another power, so of other times
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB10", "GB10"),
    ]
    for device, name in cases:
        card = find_card(device)
        assert (None if card is None else card.name) == name


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_the_named_backends_are_those_that_do_not_refuse(card: cards.Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusals that a machine of this card would get, its libraries aside."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: card.capability)
    monkeypatch.setattr(api, "load_library", lambda: SimpleNamespace(version=(0, 10, 0)))
    monkeypatch.setattr(cusparselt, "device_index", lambda _: 0)
    monkeypatch.setattr(cusparselt, "handle_of", lambda _: None)
    monkeypatch.setattr(step_backend, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(step_backend, "driver_version", lambda: 13)
    for dtype in cards.TYPES:
        problem = Problem(Pattern(6, 8), dtype, 64, 64, torch.device("cuda"))
        able = [name for name in ("hopper", "cusparselt", "ampere") if get_backend(name).why_not(problem) is None]
        assert able == cards.list_backends(card.capability, dtype)


# -- prune and inspect ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capability", "wrong"), [((8, 0), ["fp8"]), ((9, 0), []), ((10, 0), ["int8"]), (None, [])])
def test_a_type_is_warned_of_where_the_gpu_here_cannot_use_it(
    capability: tuple[int, int] | None, wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    types = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
    assert [name for name, dtype in types.items() if cards.warn_of_type(dtype) is not None] == wrong
