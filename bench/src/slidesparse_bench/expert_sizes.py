"""The sizes of experts that people serve: what ``bench gemm --grouped`` measures, and what its records are about."""

from __future__ import annotations

from dataclasses import dataclass

GATE_UP, DOWN, LAYER = "gate_up", "down", "experts"
"""What is measured: either product alone, and everything between the router and the sum over the experts of a token."""


@dataclass(frozen=True)
class ExpertSizes:
    """The experts of one layer.

    Attributes:
        hidden: Columns of gate and up, rows of down.
        inner: Rows of gate, and of up; columns of down.
        experts: Number of experts.
        top_k: Experts of a token.
    """

    hidden: int
    inner: int
    experts: int
    top_k: int

    def shape(self, part: str) -> tuple[int, int]:
        """Return (rows, columns) of one expert's weight; of the whole layer a weight as large as all three."""
        shapes = {
            GATE_UP: (2 * self.inner, self.hidden),
            DOWN: (self.hidden, self.inner),
            LAYER: (3 * self.inner, self.hidden),
        }
        return shapes[part]


MIXTURES = {
    "Qwen3-30B-A3B": ExpertSizes(2048, 768, 128, 8),
    "Mixtral-8x7B": ExpertSizes(4096, 14336, 8, 2),
    "DeepSeek-V2-Lite": ExpertSizes(2048, 1408, 64, 6),
    "gpt-oss-20b": ExpertSizes(2880, 2880, 32, 4),
}
"""The most important first."""


def part_and_routing(layer: str) -> tuple[str, str]:
    """Return what a case measures, and how its tokens choose, from its ``layer``.

    >>> part_and_routing("gate_up, balanced")
    ('gate_up', 'balanced')
    """
    part, _, routing = layer.partition(", ")
    return part, routing
