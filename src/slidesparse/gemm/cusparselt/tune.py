"""Search for the fastest cuSPARSELt algorithm of a shape.

Every algorithm number is tried with every split of K that the GPU's kernels accept. A candidate must first compute the
same product as the library's default; then all are timed, on Gaussian operands, since zeros raise the clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.autotune import copies_to_rotate, time_candidates
from slidesparse.gemm.cusparselt import api
from slidesparse.gemm.cusparselt.backend import MULTIPLE, token_bucket
from slidesparse.gemm.cusparselt.plan import MatmulPlan, Shape, compress_matrix, plan_for
from slidesparse.gemm.cusparselt.table import Algorithm, AlgorithmRecord, add_record, table_path

SEGMENT_K_ROWS = 512
"""Fewest output rows for segment-K (split_k=-1), which is reported to hang below 400 (bcacdwk/vllmbench)."""
DEVIATION = 2.0**-8
"""Allowed difference of float products, relative to the largest: FP8 MMA keeps 13 bits, and K may be cut anywhere."""


def tune(
    out: int, columns: int, tokens: int, dtype: torch.dtype, *, device: torch.device | str = "cuda"
) -> AlgorithmRecord:
    """Search for the fastest algorithm of a weight [out, K'] of a type at the bucket of M ``tokens``.

    Raises:
        InputError: A size below 1.
        UnsupportedError: Not even the default runs, or memory is too small.
    """
    if min(out, columns, tokens) < 1:
        raise InputError("a shape to tune", got=(out, columns, tokens), needed="sizes of at least 1")
    with torch.cuda.device(device):
        out, columns, rows = out + -out % MULTIPLE, columns + -columns % MULTIPLE, token_bucket(tokens)
        try:
            return _search(Shape(torch.cuda.current_device(), out, columns, rows, dtype))
        except torch.OutOfMemoryError as error:
            raise UnsupportedError(
                f"not enough GPU memory to tune {out} x {columns} at {rows} tokens",
                remedy="tune fewer tokens, or free the GPU",
            ) from error
        finally:
            torch.cuda.empty_cache()  # until then the pools of deleted graphs keep their memory


def tune_shapes(
    shapes: Iterable[tuple[int, int]],
    tokens: Iterable[int],
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cuda",
    progress: Callable[[AlgorithmRecord], None] | None = None,
) -> list[AlgorithmRecord]:
    """Search for the fastest algorithms of weights (out, K') at numbers of tokens M, and store each result at once.

    ``progress`` is called with every record; :func:`slidesparse.gemm.cusparselt.plan.plan_for` then uses it.
    """
    records, sizes = [], list(dict.fromkeys(token_bucket(count) for count in tokens))
    for out, columns in dict.fromkeys(shapes):
        for rows in sizes:
            record = tune(out, columns, rows, dtype, device=device)
            add_record(table_path(), record)
            plan_for.cache_clear()
            records.append(record)
            if progress is not None:
                progress(record)
    return records


def candidates(algorithms: int, capability: tuple[int, int], out: int) -> Iterator[Algorithm]:
    """Yield the algorithms to try: every number with every split of K, for a weight with ``out`` rows.

    From compute capability 9.0 on split_k is 1 or -1 and has no modes (the library says "On SM90 the splitK value must
    be either 1 or -1"); before, it is 1 to K, in one kernel or two.
    """
    splits = [(1, 0)]
    if capability >= (9, 0):
        splits += [(-1, 0)] if out >= SEGMENT_K_ROWS else []
    else:
        splits += [(count, mode) for count in (2, 4, 8) for mode in (api.ONE_KERNEL, api.TWO_KERNELS)]
    for number in range(algorithms):
        for split_k, mode in splits:
            yield Algorithm(number, split_k, mode)


class _Bench:
    """Copies of a shape's operands, and GEMMs over them."""

    def __init__(self, shape: Shape) -> None:
        compressed = compress_matrix(_random(shape.out, shape.columns, shape.dtype, sparse=True))
        x = _random(shape.rows, shape.columns, shape.dtype)
        copies = copies_to_rotate(compressed.numel() + x.numel() * x.element_size(), shape.device)
        self.operands = [(compressed, x)] + [(compressed.clone(), x.clone()) for _ in range(copies - 1)]
        self.y = torch.empty(shape.rows, shape.out, dtype=shape.accumulator, device=x.device)

    def run(self, plan: MatmulPlan, copy: int) -> None:
        """Run one GEMM on one copy of the operands."""
        weight, x = self.operands[copy]
        plan.run(weight, x.data_ptr(), self.y)

    def product(self, plan: MatmulPlan) -> torch.Tensor:
        """Return the product of one run."""
        self.y.fill_(1)
        self.run(plan, 0)
        return self.y


def _search(shape: Shape) -> AlgorithmRecord:
    bench, default = _Bench(shape), MatmulPlan(shape, None)
    reference = bench.product(default).clone()
    plans = [default]

    def checked() -> Iterator[tuple[Algorithm | None, Callable[[int], None]]]:
        yield None, partial(bench.run, default)
        for algorithm in candidates(default.algorithms, torch.cuda.get_device_capability(shape.device), shape.out):
            try:
                plan = MatmulPlan(shape, algorithm)
                same = _same(bench.product(plan), reference)
            except UnsupportedError:  # the library has no such kernel
                continue
            if same:
                plans.append(plan)  # graphs hold its kernels
                yield algorithm, partial(bench.run, plan)

    times = time_candidates(checked(), len(bench.operands))
    best = min(times, key=lambda algorithm: times[algorithm])
    return AlgorithmRecord(*shape.key, shape.rows, best, times[best], times[None])


def _same(product: torch.Tensor, reference: torch.Tensor) -> bool:
    if product.dtype == torch.int32:
        return torch.equal(product, reference)
    largest = float(reference.abs().max())
    return float(product.sub(reference).abs().max()) <= DEVIATION * largest


def _random(rows: int, columns: int, dtype: torch.dtype, *, sparse: bool = False) -> torch.Tensor:
    values = torch.randn(rows, columns, device="cuda")
    if sparse:
        # One of every two neighbours is kept, which makes it 2:4.
        first = torch.rand(rows, columns // 2, 1, device="cuda") < 0.5
        values *= torch.cat([first, ~first], -1).flatten(1)
    return (values * 32).round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else values.to(dtype)
