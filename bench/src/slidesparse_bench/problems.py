"""The problems of the benchmarks: shapes, patterns, token counts, and the two profiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from slidesparse.errors import InputError
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import QUANT_NAMES
from slidesparse_bench.known_models import LAYERS, MODELS, TYPES
from slidesparse_bench.records import CONTROL, DENSE_VARIANT, SQUARE, Case

BENCHMARKS = ("pack", "kernels", "linear", "gemm")
"""In the order in which ``all`` runs them: the cheap ones first."""

PATTERNS = ("2:4", "4:6", "6:8", "8:10", "10:12", "12:14", "14:16", CONTROL)
HEADLINE = "6:8"
"""The paper's main pattern; benchmarks of one pattern only take this one."""

KERNEL_COLUMNS = 2560
"""K of the paper's table of kernel latencies."""


@dataclass(frozen=True)
class Profile:
    """The problems that a run covers.

    Attributes:
        models: Names out of :data:`MODELS`.
        dtypes: Names out of :data:`slidesparse_bench.known_models.TYPES`.
        model_patterns: Patterns at model shapes.
        square_patterns: Patterns at square shapes.
        pack_models: Those of ``models`` whose weights are packed; all of ``models`` where none of these is among them.
        tokens: M at model shapes.
        squares: M = N = K.
        kernel_columns: K of the kernel benchmark.
        budget_s: Seconds that a run may take unless the user says otherwise.
        samples_s: Seconds of GPU time that one comparison aims at.
        backends: Our backends to be measured; empty for all but the reference, which defines results, not speed.
    """

    models: tuple[str, ...]
    dtypes: tuple[str, ...]
    model_patterns: tuple[str, ...]
    square_patterns: tuple[str, ...]
    pack_models: tuple[str, ...]
    tokens: tuple[int, ...]
    squares: tuple[int, ...]
    kernel_columns: tuple[int, ...]
    budget_s: float
    samples_s: float
    backends: tuple[str, ...] = ()


PROFILES = {
    "quick": Profile(
        models=tuple(MODELS),
        dtypes=("int8", "fp8", "bf16"),
        model_patterns=("2:4", "4:6", "6:8", "8:10"),
        square_patterns=PATTERNS,
        pack_models=("Qwen2.5-7B",),
        tokens=(64, 1024, 4096, 16384),
        squares=(1024, 4096, 8192),
        kernel_columns=(KERNEL_COLUMNS, 18944),
        budget_s=540,
        samples_s=0.2,
    ),
    "full": Profile(
        models=tuple(MODELS),
        dtypes=TYPES,
        model_patterns=PATTERNS,
        square_patterns=PATTERNS,
        pack_models=tuple(MODELS),
        tokens=tuple(2**i for i in range(6, 17)),
        squares=tuple(2**i for i in range(6, 15)),
        kernel_columns=(KERNEL_COLUMNS, 3584, 8192, 18944),
        budget_s=4 * 3600,
        samples_s=0.5,
    ),
}


def select(names: Sequence[str] | None, known: Iterable[str], default: Sequence[str], what: str) -> tuple[str, ...]:
    """Return a user's chosen names, each once, or the default; an InputError for an unknown one."""
    known = tuple(known)
    for name in names or ():
        if name not in known:
            raise InputError(f"unknown {what}", got=repr(name), needed=", ".join(known))
    return tuple(dict.fromkeys(names or default))


def select_patterns(texts: Sequence[str] | None, default: Sequence[str]) -> tuple[str, ...]:
    """Return a user's chosen patterns, each once, or the default.

    ``dense`` is an InputError: its times would pass for those of the dense baseline.
    """
    chosen = tuple(dict.fromkeys(str(Pattern.parse(text)) for text in texts or ()))
    if str(DENSE) in chosen:
        raise InputError("a pattern to measure", got=str(DENSE), needed="one that slides something")
    return chosen or tuple(default)


def pattern_and_columns(variant: str, columns: int) -> tuple[Pattern, int]:
    """Return the packed pattern and the columns of a sparse variant of a weight with ``columns`` columns.

    A slid dense weight is a weight of twice the columns that keeps two in every window of four.
    """
    return (Pattern.parse("2:4"), 2 * columns) if variant == CONTROL else (Pattern.parse(variant), columns)


def ideal_speedup(variant: str) -> float | None:
    """Return the speed-up over dense where 2:4 runs at twice the dense rate; 1 for dense and for the control."""
    if variant in (DENSE_VARIANT, CONTROL):
        return 1.0
    return float(Pattern.parse(variant).ideal_speedup)


def cases(benchmark: str, profile: Profile) -> list[Case]:
    """Return the cases of one benchmark, the most important first, so that a spent budget drops the least.

    All M of one weight follow one another, because making its packed forms takes longer than timing them.

    Raises:
        InputError: An unknown benchmark.
    """
    largest_first = sorted(profile.tokens, reverse=True)
    if benchmark == "pack":
        few = tuple(name for name in profile.models if name in profile.pack_models)
        packed = replace(profile, models=few or profile.models)
        return [Case(benchmark, *named, dtype, 0, *shape) for dtype, named, shape in _linears(packed)]
    if benchmark == "kernels":
        quantised = [dtype for dtype in profile.dtypes if dtype in QUANT_NAMES]
        shapes = product(quantised, profile.kernel_columns, largest_first)
        return [Case(benchmark, "", "", dtype, tokens, 0, columns) for dtype, columns, tokens in shapes]
    if benchmark == "linear":
        return _with_tokens(benchmark, profile, largest_first)
    if benchmark == "gemm":
        sizes = sorted(profile.squares, reverse=True)
        return _with_tokens(benchmark, profile, largest_first) + [
            Case(benchmark, SQUARE, "", dtype, size, size, size, scaled=False)
            for dtype, size in product(profile.dtypes, sizes)
        ]
    raise InputError("unknown benchmark", got=repr(benchmark), needed=", ".join(BENCHMARKS))


def _with_tokens(benchmark: str, profile: Profile, tokens: Sequence[int]) -> list[Case]:
    return [Case(benchmark, *named, dtype, m, *shape) for dtype, named, shape in _linears(profile) for m in tokens]


def _linears(profile: Profile) -> Iterator[tuple[str, tuple[str, str], tuple[int, int]]]:
    """Yield (dtype, (model, layer), (out, in)) of every linear."""
    for dtype, model in product(profile.dtypes, profile.models):
        for layer, shape in zip(LAYERS, MODELS[model], strict=True):
            yield dtype, (model, layer), shape
