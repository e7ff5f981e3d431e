"""Multiply by cuBLASLt's best algorithm: time all that its heuristics name for a problem, and their neighbours.

    y[M, N] = x[M, K] @ w[N, K]^T,  FP8 with scales: y = scale_x[M] * scale_w[N] * (x @ w^T), rounded once to bf16

The heuristics name one to eight algorithms. A neighbour differs from one of them in its tile or its cluster of thread
blocks, and is tried if the library says that it can run the problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from slidesparse.errors import UnsupportedError
from slidesparse.weights.quant import parse_dtype
from slidesparse_bench.kernels.cublaslt_api import CublasLtAlgorithm, DenseProblem, Product
from slidesparse_bench.kernels.time_candidates import copies_to_rotate, time_candidates
from slidesparse_bench.records import Tried

DEVIATION = 2.0**-6
"""Allowed difference from the first algorithm's product, relative to its largest element: bf16 keeps 8 bits, and an FP8
kernel that sums in the Tensor Core keeps 13 of each addition. Over a K of 18944 the two accumulators differ by more."""


@dataclass(frozen=True)
class Best:
    """The outcome of a search: the fastest product and algorithm, and everything tried, the fastest first."""

    product: Product
    algorithm: CublasLtAlgorithm
    tried: tuple[Tried, ...]


@lru_cache(maxsize=1024)
def search(problem: DenseProblem) -> Best:
    """Time all algorithms that the heuristics name for a problem, and their neighbours; once for each problem.

    Raises:
        UnsupportedError: The library has no kernel for it.
    """
    with torch.cuda.device(problem.device):
        products = [Product(problem, fast) for fast in ((True, False) if problem.dtype == "fp8" else (False,))]
        bench = _Bench(problem, products)
        entries = {
            f"{name}{_fast(problem, index)}": (product, algorithm)
            for index, product in enumerate(products)
            for name, algorithm in product.algorithms().items()
        }
        if not entries:
            raise UnsupportedError(
                f"cuBLASLt has no {problem.dtype} kernel here", got=f"{problem.out} x {problem.columns}"
            )
        faults: dict[str, str] = {}
        times = time_candidates(bench.ways(entries, faults), len(bench.operands))
        torch.cuda.empty_cache()  # the pools of graphs that are gone keep their memory until then
    if not times:
        raise UnsupportedError("every algorithm of cuBLASLt failed", got=next(iter(faults.values())))
    ordered = sorted(times, key=lambda name: times[name])
    tried = [Tried(name, round(times[name], 3)) for name in ordered] + [
        Tried(name, None, why) for name, why in faults.items()
    ]
    return Best(*entries[ordered[0]], tuple(tried))


def _fast(problem: DenseProblem, index: int) -> str:
    return ", fast accumulation" if problem.dtype == "fp8" and index == 0 else ""


class _Bench:
    """Copies of a problem's operands, enough to keep the cache cold."""

    def __init__(self, problem: DenseProblem, products: Sequence[Product]) -> None:
        dtype, device = parse_dtype(problem.dtype), f"cuda:{problem.device}"

        def random(rows: int) -> torch.Tensor:
            values = torch.randn(rows, problem.columns, device=device)
            return (values * 32).round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else values.to(dtype)

        x, w = random(problem.tokens), random(problem.out)
        copies = copies_to_rotate(x.nbytes + w.nbytes, problem.device)
        self.operands = [(x, w)] + [(x.clone(), w.clone()) for _ in range(copies - 1)]
        self.y = torch.empty(problem.tokens, problem.out, dtype=problem.out_dtype, device=device)
        self.scales = torch.ones(problem.tokens, device=device), torch.ones(problem.out, device=device)
        for product in products if problem.scaled else ():
            product.set_scales(*self.scales)

    def ways(
        self, entries: dict[str, tuple[Product, CublasLtAlgorithm]], faults: dict[str, str]
    ) -> Iterator[tuple[str, Callable[[int], None]]]:
        """Yield the algorithms that run and agree with the first of their accumulator; others go to ``faults``."""
        references: dict[Product, torch.Tensor] = {}
        for name, (product, algorithm) in entries.items():
            self.y.view(torch.uint8).fill_(0x7F)
            try:
                self._run(product, algorithm, 0)
            except UnsupportedError as error:
                faults[name] = str(error)
                continue
            if product not in references:
                references[product] = self.y.clone()
            elif not _same(self.y, references[product]):
                faults[name] = "wrong product"
                continue
            yield name, partial(self._run, product, algorithm)

    def _run(self, product: Product, algorithm: CublasLtAlgorithm, copy: int) -> None:
        product.run(algorithm, *self.operands[copy], self.y)


def _same(y: torch.Tensor, reference: torch.Tensor) -> bool:
    if y.dtype == torch.int32:
        return torch.equal(y, reference)
    wide = reference.to(torch.float32)
    return float((y.to(torch.float32) - wide).abs().max()) <= DEVIATION * float(wide.abs().max())


def multiply(
    x: torch.Tensor, w: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None, dtype: str
) -> torch.Tensor:
    """Return the product [M, N] by the best algorithm; the first call for a problem searches for it.

    Args:
        x: [M, K].
        w: [N, K].
        scales: FP8 only: of x, float32 [M, 1], and of w, [N], to be applied; None for a product alone.
        dtype: See :class:`DenseProblem`.
    """
    best = search(dense_problem(len(x), w.shape[0], w.shape[1], dtype, scales is not None))
    y = torch.empty(len(x), len(w), dtype=best.product.problem.out_dtype, device=x.device)
    if scales is not None:
        best.product.set_scales(*scales)
    best.product.run(best.algorithm, x, w, y)
    return y


def dense_problem(tokens: int, out: int, columns: int, dtype: str, scaled: bool) -> DenseProblem:
    """Return a problem on the current device."""
    return DenseProblem(tokens, out, columns, dtype, scaled, torch.cuda.current_device())
