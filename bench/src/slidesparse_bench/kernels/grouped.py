"""``bench gemm --grouped``: the products of a mixture's experts, alone and as a whole layer, against vLLM's own.

A product is one launch for all experts, on rows that were quantised, lifted and put into the order of their experts
before the clock runs. ``plain`` is the kernel of a single weight on as many rows: the rate that the grouped one could
reach if rows of different experts had one weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from slidesparse import ops
from slidesparse.errors import SlideSparseError, UnsupportedError
from slidesparse.gemm import Operand, get_backend
from slidesparse.gemm.grouped import TokenTile
from slidesparse.layer.experts import ExpertLinear, SlideExperts
from slidesparse.lifting.expert_order import Arrangement, arrange
from slidesparse.lifting.layout import Lifted
from slidesparse.tuning.checking import relative_error
from slidesparse.tuning.measure import gaussian
from slidesparse.tuning.measure_experts import TOLERANCE
from slidesparse.weights.quant import parse_dtype
from slidesparse_bench.comparison import Refusal, Session, Subject, compare
from slidesparse_bench.expert_sizes import DOWN, GATE_UP, LAYER, part_and_routing
from slidesparse_bench.kernels import grouped_stock
from slidesparse_bench.kernels.expert_operands import (
    DenseExperts,
    Matrices,
    PackedExperts,
    dense_experts,
    expected_layer,
    expected_product,
    packed_experts,
)
from slidesparse_bench.kernels.gemm import error_against
from slidesparse_bench.kernels.grouped_stock import Stock, stock_layer, stock_product
from slidesparse_bench.kernels.mixtures import draw, sizes_of
from slidesparse_bench.kernels.operands import float_type, lifted
from slidesparse_bench.records import DENSE_VARIANT, PLAIN, Case, Record

CHECKED_PAIRS, CHECKED_TOKENS = 32, 4
"""Rows of a product, and tokens of a layer, that are checked: spread over all, the first and the last among them."""


def measure(session: Session, case: Case) -> list[Record]:
    """Return the records of one case, vLLM's own first."""
    measured = _Layer(session, case) if part_and_routing(case.layer)[0] == LAYER else _Product(session, case)
    subjects: list[Subject] = []
    refusals: list[Refusal] = []
    makers: list[tuple[str, str, Callable[[], list[Subject]]]] = []
    if grouped_stock.is_here():
        makers.append((DENSE_VARIANT, "vllm", measured.stock))
    makers += [(pattern, measured.backend, partial(measured.ours, pattern)) for pattern in session.patterns(case)]
    for variant, backend, make in makers:
        try:
            subjects += make()
        except SlideSparseError as error:
            refusals.append(Refusal(variant, backend, str(error)))
    return compare(session, case, subjects, refusals)


class _Measured:
    """What the subjects of a case share."""

    def __init__(self, session: Session, case: Case) -> None:
        self.case, self.device, self.sizes = case, session.device, sizes_of(case)
        self.part, routing = part_and_routing(case.layer)
        self.chosen = draw(routing, case.tokens, self.sizes, self.device)
        self.touched = int(self.chosen.unique().numel())
        self.source = float_type(case.dtype)
        self.backend = "reference" if self.device.type == "cpu" else "hopper"

    def dense(self) -> DenseExperts:
        return dense_experts(self.sizes, self.case.dtype, self.device)

    def packed(self, pattern: str) -> PackedExperts:
        found = packed_experts(self.sizes, pattern, self.case.dtype, self.device)
        if isinstance(found, str):
            raise UnsupportedError("experts", got=found)
        return found


class _Product(_Measured):
    """One product of a layer."""

    def __init__(self, session: Session, case: Case) -> None:
        super().__init__(session, case)
        pairs, k = self.chosen.numel(), self.sizes.top_k
        self.shared = k if self.part == GATE_UP else 1  # the pairs of a token read the same row of x
        self.x = gaussian(pairs // self.shared, case.in_features, dtype=self.source, device=self.device)
        self.of_pair = torch.arange(pairs, device=self.device) // self.shared

    def stock(self) -> list[Subject]:
        dense = self.dense()
        made = stock_product(self.part, self.x, self.chosen, self.sizes, dense, parse_dtype(self.case.dtype))
        read = self.x.numel() + 4 * len(self.x)
        n_bytes = read + self._bytes(dense.n_bytes(self.part))
        check = self._check(made.rows, dense.matrices(self.part))
        return [Subject(DENSE_VARIANT, "vllm", made.algorithm, made.run, made.operands, n_bytes, check)]

    def ours(self, pattern: str) -> list[Subject]:
        experts = self.packed(pattern)
        first, second = experts.layer.tiles(self.chosen.numel())
        linear, tile = (experts.layer.gate_up, first) if self.part == GATE_UP else (experts.layer.down, second)
        at = arrange(self.chosen, self.sizes.experts, tile.tokens)
        rows = at.rows.flatten()
        of_row = torch.full_like(at.tokens, -1).scatter_(0, rows, self.of_pair)
        by_row = at._replace(rows=rows.view(-1, self.shared), tokens=of_row)
        values, scale, _ = linear.lift(self.x, by_row, "none", gather=True)
        read = len(rows) * (values.shape[1] * values.dtype.itemsize + 4)
        grouped = Subject(
            variant=pattern,
            backend=self.backend,
            algorithm=str(tile),
            run=partial(_multiply, tile, self.source),
            operands=(linear, values, scale, at),
            n_bytes=read + self._bytes(experts.n_bytes(self.part)),
            check=self._check(rows, experts.matrices(self.part)),
        )
        return [grouped, self._plain(pattern, experts)]

    def _plain(self, pattern: str, experts: PackedExperts) -> Subject:
        """Return all rows by the weight of the first expert."""
        backend, one = get_backend(self.backend), experts.packed[self.part][0]
        x = self.x[self.of_pair]
        values, scale = lifted(x, one, backend.layout, self.backend)
        out = self.case.out_features
        return Subject(
            variant=f"{PLAIN} {pattern}",
            backend=self.backend,
            algorithm="one weight",
            run=partial(_plain, self.backend, out, self.source),
            operands=(values, scale, backend.prepare(one), one.scale),
            n_bytes=values.nbytes + 4 * len(x) + experts.n_bytes(self.part) + len(x) * out * self.source.itemsize,
            check=error_against(x, one, scaled=True),
        )

    def _bytes(self, of_expert: int) -> int:
        """Return the bytes of the weights that have tokens, and of the product."""
        return self.touched * of_expert + self.chosen.numel() * self.case.out_features * self.source.itemsize

    def _check(self, rows: torch.Tensor, of: Matrices) -> Callable[[torch.Tensor], float]:
        pairs = _spread(self.chosen.numel(), CHECKED_PAIRS, self.device)
        experts = self.chosen.flatten()[pairs].tolist()
        return _against(lambda: expected_product(self.x[self.of_pair[pairs]], experts, of, torch.float32), rows[pairs])


class _Layer(_Measured):
    """A whole layer: the order of its tokens, both products with what stands between them, the sum."""

    def __init__(self, session: Session, case: Case) -> None:
        super().__init__(session, case)
        self.x = gaussian(case.tokens, self.sizes.hidden, dtype=self.source, device=self.device)
        logits = gaussian(case.tokens, self.sizes.top_k, dtype=torch.float32, device=self.device, seed=3)
        self.weights = logits.softmax(1)

    def stock(self) -> list[Subject]:
        dense, dtype = self.dense(), parse_dtype(self.case.dtype)
        made: Stock = stock_layer(self.x, self.weights, self.chosen, self.sizes, dense, dtype)
        return [self._subject(DENSE_VARIANT, "vllm", made.algorithm, made.run, made.operands, dense)]

    def ours(self, pattern: str) -> list[Subject]:
        experts = self.packed(pattern)
        operands = (experts.layer, self.x, self.weights, self.chosen)
        tile = str(experts.layer.tiles(self.chosen.numel())[0])
        return [self._subject(pattern, self.backend, tile, _run_layer, operands, experts)]

    def _subject(
        self,
        variant: str,
        backend: str,
        algorithm: str,
        run: Callable[..., torch.Tensor],
        operands: Sequence[object],
        experts: PackedExperts | DenseExperts,
    ) -> Subject:
        tokens = _spread(len(self.x), CHECKED_TOKENS, self.device)
        given = self.x[tokens], self.weights[tokens], self.chosen[tokens]
        matrices = experts.matrices(GATE_UP), experts.matrices(DOWN)
        weights = self.touched * sum(experts.n_bytes(part) for part in (GATE_UP, DOWN))
        return Subject(
            variant=variant,
            backend=backend,
            algorithm=algorithm,
            run=run,
            operands=tuple(operands),
            n_bytes=weights + 2 * self.x.nbytes,
            check=_against(lambda: expected_layer(*given, *matrices), tokens),
            tolerance=TOLERANCE,
        )


def _multiply(
    tile: TokenTile,
    out_dtype: torch.dtype,
    linear: ExpertLinear,
    values: torch.Tensor,
    scale: torch.Tensor,
    at: Arrangement,
) -> torch.Tensor:
    return linear.multiply(Lifted(values, scale, None), at, out_dtype, tile)


def _plain(
    backend: str,
    out: int,
    out_dtype: torch.dtype,
    values: torch.Tensor,
    scale: torch.Tensor,
    operand: Operand,
    scale_w: torch.Tensor,
) -> torch.Tensor:
    y: torch.Tensor = ops.gemm(values, scale, list(operand), scale_w, None, out, out_dtype, backend)
    return y


def _run_layer(layer: SlideExperts, *tensors: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = layer(*tensors)
    return y


def _spread(count: int, most: int, device: torch.device) -> torch.Tensor:
    """Return ``most`` of ``count`` numbers, or all, with the first and the last."""
    return torch.linspace(0, count - 1, min(count, most), device=device).round().to(torch.int64)


def _against(expected: Callable[[], torch.Tensor], rows: torch.Tensor) -> Callable[[torch.Tensor], float]:
    """Return a check of some rows of a result, against what is computed when it is asked for."""
    reference: list[torch.Tensor] = []

    def check(y: torch.Tensor) -> float:
        if not reference:
            reference.append(expected())
        return relative_error(y[rows], reference[0])

    return check
