"""Backends of each GPU that people serve on, and who has measured them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slidesparse.gemm.ampere import backend as ampere
from slidesparse.gemm.backend import WITHOUT_INT8
from slidesparse.gemm.cusparselt import capabilities as cusparselt
from slidesparse.gemm.hopper.backend import CAPABILITY as HOPPER
from slidesparse.weights.quant import dtype_name

TYPES = (torch.int8, torch.float8_e4m3fn, torch.bfloat16)


@dataclass(frozen=True)
class Card:
    """One kind of GPU.

    Attributes:
        name: A word of the driver's name for it.
        capability: Compute capability.
        measured_by: The people who have measured sparse kernels on it.
    """

    name: str
    capability: tuple[int, int]
    measured_by: str = "nobody"

    def to_json(self) -> dict[str, Any]:
        """Return the card's data for JSON."""
        return {
            "name": self.name,
            "capability": "{}.{}".format(*self.capability),
            "backends": {dtype_name(dtype): list_backends(self.capability, dtype) for dtype in TYPES},
            "stock_vllm_serves_int8": serves_int8(self.capability),
            "measured_by": self.measured_by,
        }


AUTHORS = "the paper's authors, on cusparselt"

CARDS = (
    Card("A100", (8, 0), AUTHORS),
    Card("RTX 4090", (8, 9), AUTHORS),
    Card("L40S", (8, 9)),
    Card("H100", (9, 0), "us"),
    Card("H200", (9, 0), "us"),
    Card("B200", (10, 0), AUTHORS),
    Card("B300", (10, 3)),
    Card("RTX 5080", (12, 0), AUTHORS),
    Card("RTX 5090", (12, 0)),
    Card("GB10", (12, 1), f"{AUTHORS}: slower than dense"),
)
"""Cards in order of compute capability. Ours are SXM cards."""

NO_VARIANT = r"(?! (?:D|Laptop|NVL)\b)"
"""Suffixes that tell variants of a card apart."""


def find_card(device_name: str) -> Card | None:
    """Return the card of a GPU by its driver's name; None if it is not in the list.

    >>> find_card("NVIDIA GeForce RTX 4090").capability, find_card("NVIDIA GH200 480GB")
    ((8, 9), None)
    """
    return next((card for card in CARDS if re.search(rf"\b{card.name}\b{NO_VARIANT}", device_name)), None)


def list_backends(capability: tuple[int, int], dtype: torch.dtype) -> list[str]:
    """Return the sparse backends with kernels of a type for a GPU, tried there or not.

    >>> list_backends((9, 0), torch.int8), list_backends((10, 3), torch.int8)
    (['hopper', 'cusparselt', 'ampere'], ['ampere'])
    """
    has = {
        "hopper": capability == HOPPER,
        "cusparselt": cusparselt.why_no_kernels(dtype, capability) is None,
        "ampere": ampere.why_no_kernels(dtype, capability) is None,
    }
    return [name for name, here in has.items() if here]


def serves_int8(capability: tuple[int, int]) -> bool:
    """Return whether stock vLLM (0.22 to 0.33) starts with an INT8 checkpoint on such a GPU."""
    return capability < WITHOUT_INT8


def warn_of_type(dtype: torch.dtype) -> str | None:
    """Return a warning if this machine's GPU cannot use a checkpoint of an 8-bit type; else, or without a GPU, None."""
    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability()
    if dtype == torch.int8 and not serves_int8(capability):
        return "INT8 does not start in stock vLLM on this GPU: for Blackwell prune with --dtype fp8"
    if dtype == torch.float8_e4m3fn and not list_backends(capability, dtype):
        return "FP8 has no sparse kernels on this GPU: for Ampere prune with --dtype int8"
    return None


def describe_measurement(device_name: str) -> str:
    """Return, in words, who has measured sparse layers on a GPU."""
    card = find_card(device_name)
    if card is None or card.measured_by == "nobody":
        return "by nobody known to this project: a start measures its layers"
    return f"by {'this project' if card.measured_by == 'us' else card.measured_by}: docs/cards.md"


def ask_for_times(device_name: str, file: Path) -> str | None:
    """Return a line that asks for a file of times, from a GPU on which this project has not measured; else None."""
    card = find_card(device_name)
    if card is not None and card.measured_by == "us":
        return None
    return f"slidesparse: this project has no {device_name}: send it the times in {file}, as docs/cards.md says"


def table() -> list[tuple[str, ...]]:
    """Return a row for each card: name, capability, backends by type, INT8 in vLLM, and who measured it."""
    return [
        (
            card.name,
            "{}.{}".format(*card.capability),
            *(", ".join(list_backends(card.capability, dtype)) or "none" for dtype in TYPES),
            "yes" if serves_int8(card.capability) else "no",
            card.measured_by,
        )
        for card in CARDS
    ]


COLUMNS = ("card", "capability", "INT8", "FP8", "BF16", "INT8 in stock vLLM", "measured by")
"""Column heads of :func:`table`."""
