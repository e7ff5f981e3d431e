"""``slidesparse tune``: the algorithm search over the shapes of whole models."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slidesparse.bench.problems import MODELS, select
from slidesparse.errors import UnsupportedError
from slidesparse.gemm.cusparselt_table import Record, table_path
from slidesparse.gemm.cusparselt_tune import tune_shapes
from slidesparse.pattern import Pattern
from slidesparse.progress import progress_bar, table
from slidesparse.quant import parse_dtype

PATTERNS = ("2:4", "4:6", "6:8", "8:10")
DTYPES = ("int8", "fp8")


def tune_models(
    models: Sequence[str] | None, patterns: Sequence[str] | None, dtypes: Sequence[str] | None, tokens: Sequence[int]
) -> list[Record]:
    """Search at every linear of every model, and store what is found.

    Args:
        models: Names out of ``bench.problems.MODELS``; None for all.
        patterns: Uniform patterns; None for 2:4, 4:6, 6:8 and 8:10.
        dtypes: ``int8``, ``fp8``, ``bf16``; None for the first two.
        tokens: M's; a result serves neighbouring M's too.

    Raises:
        InputError: An unknown name.
        UnsupportedError: There is no CUDA device, or the library is missing.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("tuning needs a CUDA device", got="none that torch can use")
    names = select(models, MODELS, tuple(MODELS), "model")
    parsed = [Pattern.parse(text) for text in patterns or PATTERNS]
    shapes = {
        (out, pattern.groups(columns) * pattern.slid_group)
        for name in names
        for out, columns in MODELS[name]
        for pattern in parsed
    }
    records: list[Record] = []
    total = len(shapes) * len(tokens) * len(dtypes or DTYPES)
    with progress_bar("tune", total, unit="searches") as advance:
        for dtype in dtypes or DTYPES:
            records += tune_shapes(sorted(shapes), tokens, parse_dtype(dtype), progress=lambda _: advance(1))
    return records


def describe(records: Sequence[Record]) -> str:
    """What was found, for people."""
    rows = [
        (
            f"{r.key.out}x{r.key.columns}",
            r.rows,
            r.key.dtype,
            f"{r.default_us:.1f}",
            f"{r.time_us:.1f}",
            str(r.best) if r.best else "the default",
        )
        for r in records
    ]
    columns = ("weight, packed", "tokens", "type", "default us", "best us", "algorithm")
    return f"{table(columns, rows)}\nstored in {table_path()}"
