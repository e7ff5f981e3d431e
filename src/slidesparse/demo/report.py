"""The results of the demonstration, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from slidesparse.base.progress import table
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import QuantName


@dataclass(frozen=True)
class DemoRow:
    """One pattern in one type.

    Attributes:
        pattern: Pattern of the treated linears.
        dtype: Type of weights and quantised activations.
        sparsity: Share of zeros in the quantised weights, counted.
        fidelity: Mean cosine between these embeddings and those of the original float32 model.
        n_bytes: Of the treated linears in packed 2:4 form, scales excluded; ``relative_bytes`` over dense 8 bit.
        ideal_speedup: Over dense, where 2:4 runs at twice the dense rate.
        exact: Whether slid and dense embeddings of the same pruned weights are equal bit for bit.
        max_difference: The largest absolute difference of these embeddings.
    """

    pattern: str
    dtype: QuantName
    sparsity: float
    fidelity: float
    n_bytes: int
    relative_bytes: float
    ideal_speedup: float
    exact: bool
    max_difference: float


@dataclass(frozen=True)
class DemoReport:
    """The results of the demonstration: seconds with loading, and a row for dense, then for each pattern."""

    model: str
    device: str
    sentences: int
    seconds: float
    rows: tuple[DemoRow, ...]

    @property
    def exact(self) -> bool:
        """True when every INT8 row is exact; anything else is a bug."""
        return all(row.exact for row in self.rows if row.dtype == "int8")

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and numbers."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows], "exact": self.exact}

    def describe(self) -> str:
        """Return the report as text, without a final newline."""
        head = ["pattern", "dtype", "zeros", "fidelity", "bytes", "of dense", "ideal"]
        rows = [
            [
                *(row.pattern, row.dtype, f"{row.sparsity:.1%}", f"{row.fidelity:.4f}"),
                *(f"{row.n_bytes / 1e6:.2f} MB", f"{row.relative_bytes:.1%}", f"{row.ideal_speedup:.2f}x"),
                _agreement(row),
            ]
            for row in self.rows
        ]
        return "\n".join([table([*head, "slid vs dense"], rows), "", *self._notes()])

    def _notes(self) -> Iterator[str]:
        yield f"{self.model} on {self.device}: {self.sentences} sentences, {self.seconds:.0f} s"
        yield "fidelity: mean cosine to the original float32 embeddings, after magnitude pruning without retraining"
        yield "bytes: the treated linears, values and 2:4 metadata"
        sparse = [row for row in self.rows if row.dtype == "int8" and row.pattern != str(DENSE)]
        equal = sum(row.exact for row in sparse)
        yield f"INT8: slid equals dense on the same pruned weights, bit for bit, in {equal} of {len(sparse)} patterns"
        yield "FP8: sums in another order; every later layer's rounding to 8 bits magnifies the last bit that differs"


def _agreement(row: DemoRow) -> str:
    if row.pattern == str(DENSE):
        return "-"
    if row.exact:
        return "equal bits"
    return f"{'UNEQUAL, ' if row.dtype == 'int8' else ''}max diff {row.max_difference:.0e}"
