"""The engines and sizes that ``bench vllm`` covers, and a user's choice of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slidesparse.errors import InputError
from slidesparse.gemm import BACKENDS
from slidesparse.offline.tune_job import select, select_patterns
from slidesparse_bench.engine.vllm_checkpoint import DENSE_MODELS
from slidesparse_bench.engine.vllm_engine import BATCHED_TOKENS
from slidesparse_bench.kernels.linear import AUTO
from slidesparse_bench.records import DENSE_VARIANT


@dataclass(frozen=True)
class EngineProfile:
    """The engines and sizes that a run covers.

    Attributes:
        models: Names out of :data:`slidesparse_bench.engine.vllm_checkpoint.DENSE_MODELS`.
        dtypes: ``int8``, ``fp8`` or ``bf16``.
        patterns: Patterns of the pruned checkpoints.
        prefill: M's of prefill, in tokens.
        decode: M's of decoding, in sequences.
        rounds: How often each measurement is taken, after one that warms up.
        layers: Decoder layers; None for all.
        backends: ``auto`` or backends' names; each runs all sparse layers of engines of its own.
        graphs: Tokens of the largest batch that all engines, the dense one too, keep CUDA graphs for; None for vLLM's
            own choice, 512.
        alone: Start and measure one engine after the other, since a server has the machine for itself. Changes of the
            clocks then show as differences between engines, so ``noise`` is that of dense first and last.
    """

    models: tuple[str, ...]
    dtypes: tuple[str, ...]
    patterns: tuple[str, ...]
    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    rounds: int = 9
    layers: int | None = None
    backends: tuple[str, ...] = (AUTO,)
    graphs: int | None = None
    alone: bool = False

    def variants(self) -> list[Variant]:
        """Return the engines: dense, then every pattern on every backend."""
        return [Variant(DENSE_VARIANT, ""), *(Variant(p, backend) for p in self.patterns for backend in self.backends)]

    def kind(self, what: str) -> str:
        """Return what records call ``prefill`` or ``decode``; another way of measuring has another name."""
        graphs = "" if self.graphs is None else f", graphs to {self.graphs} tokens"
        return what + graphs + (", one engine at a time" if self.alone else "")

    def sizes(self) -> list[tuple[str, int]]:
        """Return (``prefill`` or ``decode``, size) of everything that is timed."""
        return [("prefill", m) for m in self.prefill] + [("decode", m) for m in self.decode]


@dataclass(frozen=True)
class Variant:
    """The checkpoint that an engine serves, and its backend; stock vLLM where that is empty."""

    pattern: str
    backend: str

    @property
    def label(self) -> str:
        """The variant's name in records: a pattern, with ``auto`` before it where ``auto`` chose the backends."""
        return f"{AUTO} {self.pattern}" if self.backend == AUTO else self.pattern


PROFILES = {
    "quick": EngineProfile(("Qwen2.5-7B",), ("int8",), ("2:4", "4:6", "6:8"), (1024, 4096, 16384), (64, 256)),
    "full": EngineProfile(
        DENSE_MODELS,
        ("int8", "fp8"),
        ("2:4", "4:6", "6:8", "8:10"),
        tuple(2**i for i in range(9, 17)),
        (64, 128, 256, 512),
    ),
}


def adapt(
    profile: EngineProfile,
    dtypes: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    *,
    patterns: Sequence[str] | None = None,
    tokens: Sequence[int] | None = None,
    sequences: Sequence[int] | None = None,
    rounds: int | None = None,
    layers: int | None = None,
    backends: Sequence[str] | None = None,
    graphs: int | None = None,
    alone: bool = False,
) -> EngineProfile:
    """Return a profile with a user's choices.

    Raises:
        InputError: An unknown name, or too small a number.
    """
    for what, least, numbers in (
        ("tokens", 1, tokens),
        ("sequences", 1, sequences),
        ("rounds", 2, None if rounds is None else [rounds]),  # percentiles need two
        ("layers", 1, None if layers is None else [layers]),
        ("graphs", 1, None if graphs is None else [graphs]),
    ):
        if any(number < least for number in numbers or ()):
            raise InputError(what, got=min(numbers or ()), needed=f"at least {least}")
    if graphs is not None and graphs > BATCHED_TOKENS:
        raise InputError("graphs", got=graphs, needed=f"at most {BATCHED_TOKENS} tokens, the largest batch")
    return replace(
        profile,
        dtypes=select(dtypes, ("int8", "fp8", "bf16"), profile.dtypes, "dtype"),
        models=select(models, DENSE_MODELS, profile.models, "model"),
        patterns=select_patterns(patterns, profile.patterns),
        prefill=tuple(dict.fromkeys(tokens or profile.prefill)),
        decode=tuple(dict.fromkeys(sequences or profile.decode)),
        rounds=rounds or profile.rounds,
        layers=layers,
        backends=select(backends, (AUTO, *BACKENDS), profile.backends, "backend"),
        graphs=graphs,
        alone=alone,
    )
