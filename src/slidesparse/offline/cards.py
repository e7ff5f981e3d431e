"""Say for each GPU that people serve on which backends can run there, and who has measured them.

Nothing here was measured by this project but what the H100 and H200 did. The other figures are those of the SlideSparse
paper's authors, from ``slidesparse/tools/all_results_table/cuBLASLt_baseline_csv/appendix_b_model_kernel_*.csv`` of
their repository bcacdwk/vllmbench at 92a8ca4: GEMMs of Qwen2.5-7B's four linears by cuSPARSELt, over their own cuBLASLt
path, at 6:8. Their INT8 figures of a B200 are left out, since their dense GEMM runs far below its rate there.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slidesparse.gemm.cusparselt.capabilities import OLDEST_FP8, why_no_kernels
from slidesparse.gemm.hopper.backend import CAPABILITY as HOPPER
from slidesparse.weights.quant import dtype_name

TYPES = (torch.int8, torch.float8_e4m3fn, torch.bfloat16)

TOKENS = (64, 1024, 4096, 16384)
"""Numbers of tokens of :attr:`Card.authors`."""

BLACKWELL = (10, 0)
"""From this compute capability on, vLLM has no kernel for INT8 that it would choose (vLLM issue 54311)."""


@dataclass(frozen=True)
class Card:
    """One kind of GPU.

    Attributes:
        name: Its name, a word of what the driver calls it.
        capability: Compute capability.
        authors: Type -> dense time over the time of 6:8 in the authors' files, for :data:`TOKENS`; below 1 is slower.
        ours: Whether this project has measured it.
    """

    name: str
    capability: tuple[int, int]
    authors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    ours: bool = False

    @property
    def measured_by(self) -> str:
        """Whose measurement there is of sparse kernels on this card."""
        return "us" if self.ours else "the paper's authors" if self.authors else "nobody"

    @property
    def is_slower(self) -> bool:
        """Whether 6:8 was slower than dense at most of the numbers of tokens, in every type that was measured."""
        return bool(self.authors) and all(statistics.median(gains) < 1 for gains in self.authors.values())

    def to_json(self) -> dict[str, Any]:
        """Return what is known of the card."""
        return {
            "name": self.name,
            "capability": "{}.{}".format(*self.capability),
            "backends": {dtype_name(dtype): list_backends(self.capability, dtype) for dtype in TYPES},
            "stock_vllm_serves_int8": serves_int8(self.capability),
            "measured_by": self.measured_by,
            "authors_6:8_over_dense": {"tokens": TOKENS, **self.authors} if self.authors else None,
        }


CARDS = (
    Card("A100", (8, 0), {"int8": (1.00, 1.27, 1.38, 1.42), "bf16": (1.03, 0.88, 0.90, 0.90)}),
    Card(
        "RTX 4090",
        (8, 9),
        {"int8": (1.11, 1.30, 1.09, 1.07), "fp8": (0.80, 1.32, 1.36, 1.37), "bf16": (1.15, 0.96, 0.95, 0.97)},
    ),
    Card("L40S", (8, 9)),
    Card(
        "H100",
        (9, 0),
        {"int8": (2.10, 1.06, 1.15, 1.06), "fp8": (1.08, 1.08, 1.13, 1.19), "bf16": (0.80, 1.15, 1.11, 1.10)},
        ours=True,
    ),
    Card("H200", (9, 0), ours=True),
    Card("B200", (10, 0), {"fp8": (1.01, 1.07, 1.09, 1.18), "bf16": (1.08, 1.09, 1.17, 1.20)}),
    Card("B300", (10, 3)),
    Card(
        "RTX 5080",
        (12, 0),
        {"int8": (1.07, 1.12, 1.03, 1.02), "fp8": (0.99, 1.18, 1.15, 1.15), "bf16": (1.91, 1.15, 1.15, 1.14)},
    ),
    Card("RTX 5090", (12, 0)),
    Card(
        "GB10",
        (12, 1),
        {"int8": (1.01, 1.00, 0.93, 0.86), "fp8": (1.27, 0.85, 0.81, 0.83), "bf16": (1.25, 0.43, 0.41, 0.38)},
    ),
)
"""In the order of their compute capabilities. Ours are SXM cards."""

AUTHORS_H100 = "PCIe"
"""A word of the H100 that the authors have measured, and we have not."""

FP4_GEMMS = {
    "B200": {1024: (1.35, 1.22), 4096: (0.81, 0.65), 8192: (0.81, 0.57), 16384: (0.75, 0.50)},
    "RTX 5080": {1024: (1.01, 0.76)},
    "GB10": {1024: (0.84, 0.71), 4096: (0.78, 0.55), 8192: (0.73, 0.50)},
}
"""Card -> M = N = K -> 2:4 and 6:8 over dense of the authors' FP4 GEMMs, from ``appendix_a_square_FP4.csv`` there."""

TRADE = (
    "int8 is the faster one in stock vLLM on an H200, and the only one with sparse kernels on Ampere (A100);"
    " fp8 is the one that stock vLLM serves on Blackwell (B200, RTX 5090)"
)
"""How the two 8-bit types differ, for those who have to choose. The first part is of docs/measured.md."""


OTHERS = r"(?! (?:D|Laptop|NVL)\b)"
"""What makes another card of a name."""


def find_card(device_name: str) -> Card | None:
    """Return the card of a GPU by the name that its driver gives; None for one that is not in the list.

    >>> find_card("NVIDIA GeForce RTX 4090").capability, find_card("NVIDIA GH200 480GB")
    ((8, 9), None)
    """
    return next((card for card in CARDS if re.search(rf"\b{card.name}\b{OTHERS}", device_name)), None)


def list_backends(capability: tuple[int, int], dtype: torch.dtype) -> list[str]:
    """Return the sparse backends that have kernels of a type for a GPU; whether they were tried there is another thing.

    >>> list_backends((9, 0), torch.int8), list_backends((10, 3), torch.int8)
    (['hopper', 'cusparselt'], [])
    """
    hopper = ["hopper"] if capability == HOPPER else []
    return hopper + (["cusparselt"] if why_no_kernels(dtype, capability) is None else [])


def serves_int8(capability: tuple[int, int]) -> bool:
    """Return whether stock vLLM (0.22 to 0.33) starts with an INT8 checkpoint, packed or dense, on such a GPU."""
    return capability < BLACKWELL


def warn_of_type(dtype: torch.dtype) -> str | None:
    """Return where a checkpoint of an 8-bit type cannot be used, in one line for its owner; None for other types."""
    if dtype == torch.int8:
        return "INT8 does not start in stock vLLM on Blackwell (B200, B300, RTX 50, GB10): for these make it in FP8"
    if dtype == torch.float8_e4m3fn:
        return "FP8 has sparse kernels from compute capability 8.9 on: for Ampere (A100) make it in INT8"
    return None


def describe_trade(gpus: Iterable[tuple[str, tuple[int, int]]]) -> str:
    """Return how the two 8-bit types differ, and which suits each GPU of this machine, given by name and capability.

    >>> describe_trade([("NVIDIA H200", (9, 0))]).rpartition("; ")[2]
    "for this machine's NVIDIA H200: --dtype int8"
    """
    # FP8 has no kernels before Ada, and INT8 is faster on Hopper.
    better = {name: "int8" if at < OLDEST_FP8 or at == HOPPER else "fp8" for name, at in gpus}
    return "; ".join([TRADE, *(f"for this machine's {name}: --dtype {dtype}" for name, dtype in better.items())])


def describe_measurement(device_name: str) -> str:
    """Return who has measured sparse layers on a GPU, and what they found, in one sentence."""
    card = find_card(device_name)
    if card is None or card.measured_by == "nobody":
        return "by nobody known to this project: measure it with slidesparse tune"
    if card.measured_by == "us" and AUTHORS_H100 not in device_name:
        return "by this project: docs/measured.md, docs/cards.md"
    gains = "; ".join(f"{dtype} {', '.join(f'{gain:.2f}' for gain in row)}" for dtype, row in card.authors.items())
    return f"by the paper's authors, cuSPARSELt at 6:8 over dense, {', '.join(map(str, TOKENS))} tokens: {gains}"


def table(cards: Iterable[Card] = CARDS) -> list[tuple[str, ...]]:
    """Return a row for each card: name, capability, backends by type, whether vLLM serves INT8, and who measured it."""
    return [
        (
            card.name,
            "{}.{}".format(*card.capability),
            *(", ".join(list_backends(card.capability, dtype)) or "none" for dtype in TYPES),
            "yes" if serves_int8(card.capability) else "no",
            card.measured_by + (": slower than dense" if card.is_slower else ""),
        )
        for card in cards
    ]


def describe_fp4() -> str:
    """Return the authors' FP4 figures in one sentence."""
    figures = ", ".join(
        f"{gains[max(gains)][1]:.2f} of dense on a {name} ({max(gains)})" for name, gains in FP4_GEMMS.items()
    )
    return f"FP4 is slower than dense at 6:8 in the authors' files, and no backend runs it: {figures}"


COLUMNS = ("card", "capability", "INT8", "FP8", "BF16", "INT8 in stock vLLM", "measured by")
"""Heads of :func:`table`."""
