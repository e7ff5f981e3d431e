"""The job of ``slidesparse tune``: the layers of models, their patterns and types, numbers of tokens, backends.

Sizes are those of a server's linears, which merges those of one module that read the same input: q, k and v, gate and
up. They are found by running the model once on the meta device, as for pruning, so no architecture needs a table of
names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.marker import Marker
from slidesparse.checkpoints.meta_model import MetaModel, build_meta_model
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.files.stored import STORED_NAMES
from slidesparse.gemm import BACKENDS, get_backend
from slidesparse.models.layer_kinds import alike
from slidesparse.models.sparsify import run_once
from slidesparse.models.targets import find_targets, input_sets
from slidesparse.offline.known_models import LAYERS, MODELS, TYPES
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import DTYPES, QUANT_NAMES, Rounding

PATTERNS = ("2:4", "4:6", "6:8", "8:10")


@dataclass(frozen=True)
class ModelShapes:
    """The linears of a model.

    Attributes:
        name: Its name, or its folder.
        sizes: (linear, out, columns), each size once.
        patterns: The patterns of a pruned checkpoint; empty for a model that may be pruned to any.
        dtypes: Its type of weights; empty for a model that may be quantised to any.
    """

    name: str
    sizes: tuple[tuple[str, int, int], ...]
    patterns: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of layer, measured once: type, rows, columns, pattern and rounding of its weight."""

    dtype: str
    out: int
    columns: int
    pattern: str
    rounding: Rounding = "absmax"

    def __str__(self) -> str:
        """Return ``int8 4608x3584 6:8``."""
        return f"{self.dtype} {self.out}x{self.columns} {self.pattern}"


@dataclass(frozen=True)
class TuneJob:
    """The shapes, types and backends to tune.

    Attributes:
        models: The models, with the patterns and types to tune for each.
        tokens: M's, ascending.
        backends: Names; algorithms are searched only if cuSPARSELt is among them.
    """

    models: tuple[ModelShapes, ...]
    tokens: tuple[int, ...]
    backends: tuple[str, ...]

    def kinds(self) -> list[Kind]:
        """Return the kinds of layers, each once, those of a model one after another."""
        roundings = dict.fromkeys(map(rounding_for, self.backends))
        kinds = (
            Kind(dtype, out, columns, pattern, rounding)
            for model in self.models
            for dtype in model.dtypes
            for _, out, columns in model.sizes
            for pattern in model.patterns
            for rounding in roundings
            if rounding == "absmax" or dtype == "int8"
        )
        return list(dict.fromkeys(kinds))

    def backends_of(self, kind: Kind) -> list[str]:
        """Return the backends that read such weights."""
        return [name for name in self.backends if rounding_for(name) == kind.rounding]

    def packed_shapes(self) -> list[tuple[str, int, int]]:
        """Return (type, out, K') of the 2:4 forms of all weights, each once."""
        return sorted(
            {
                (dtype, out, p.groups(columns) * p.slid_group)
                for model in self.models
                for _, out, columns in model.sizes
                for p in map(Pattern.parse, model.patterns)
                for dtype in model.dtypes
            }
        )


def make_job(
    models: Sequence[str] | None,
    patterns: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    tokens: Sequence[int],
    backends: Sequence[str] | None = None,
) -> TuneJob:
    """Return a job with a user's choices; None: all known models, and all accelerated backends.

    Without patterns or types a pruned checkpoint's own are tuned; 2:4 to 8:10, INT8 and FP8 for any other model.

    Raises:
        InputError: An unknown name, a pattern that slides nothing, or an M below 1.
        CheckpointError: A checkpoint that cannot be read.
    """
    chosen = select_patterns(patterns, ())
    if not tokens or min(tokens) < 1:
        raise InputError("tokens to tune for", got=list(tokens), needed="numbers of at least 1")
    types = select(dtypes, TYPES, (), "dtype")
    by_name = {shapes.name: shapes for shapes in map(shapes_of, models or MODELS)}
    return TuneJob(
        tuple(
            replace(
                shapes, patterns=chosen or shapes.patterns or PATTERNS, dtypes=types or shapes.dtypes or QUANT_NAMES
            )
            for shapes in by_name.values()
        ),
        tuple(sorted(set(tokens))),
        select(backends, accelerated(), accelerated(), "backend"),
    )


def shapes_of(model: str) -> ModelShapes:
    """Return the sizes of a known model, or of a local checkpoint; an UnsupportedError for unmeasured types."""
    if model in MODELS:
        named = zip(LAYERS, MODELS[model], strict=True)
        return ModelShapes(model, _each_once([(layer, out, columns) for layer, (out, columns) in named]))
    if not Path(model).is_dir():
        needed = f"a checkpoint's folder or one of {', '.join(MODELS)}"
        raise InputError("unknown model", got=repr(model), needed=needed)
    checkpoint = Checkpoint(model)
    marker = Marker.from_config(checkpoint.config)
    meta = build_meta_model(checkpoint)
    linears = find_targets(meta.model).linears if marker is None else meta.linears(marker)
    if not linears:
        raise InputError("a model to tune", got=f"{model} without linears that can be sparse")
    patterns = {} if marker is None else {name: marker.pattern_of(name) for name in linears}
    slid = [name for name in linears if patterns.get(name) != DENSE]
    sizes = [
        ("+".join(name.rpartition(".")[2] for name in names), sum(linears[n].out_features for n in names), columns)
        for names in _merged(meta, slid)
        for columns in [linears[names[0]].in_features]
    ]
    texts = tuple(dict.fromkeys(str(patterns[name]) for name in slid)) if marker is not None else ()
    return ModelShapes(model, _each_once(sizes), texts, _dtypes(checkpoint, meta, slid, marker))


def _each_once(sizes: Sequence[tuple[str, int, int]]) -> tuple[tuple[str, int, int], ...]:
    return tuple({size[1:]: size for size in sizes}.values())


def _merged(meta: MetaModel, names: Sequence[str]) -> list[list[str]]:
    """Group the linears that a server merges: those of one module that read the same input."""
    run = run_once(meta.model)
    known = dict(meta.model.named_modules())
    linears = {name: known[name] for name in names}
    sets = [[name] for name in names] if run is None else input_sets(meta.model, linears, run)
    return [merged for together in sets for merged in alike(together, lambda name: name.rpartition(".")[0])]


def _dtypes(checkpoint: Checkpoint, meta: MetaModel, names: Sequence[str], marker: Marker | None) -> tuple[str, ...]:
    """Return the type of a pruned or quantised checkpoint's weights; none for a dense float one, which may get any."""
    stored = {checkpoint.stored(f"{meta.prefix(name)}.weight").dtype for name in names}
    known = {STORED_NAMES[dtype]: name for name, dtype in DTYPES.items()}
    types = tuple(known.get(text, text) for text in sorted(stored))
    if marker is None and not set(types) & {"int8", "fp8"}:
        return ()
    if not set(types) <= set(TYPES):
        raise UnsupportedError("type of the weights to tune", got=", ".join(types), needed=", ".join(TYPES))
    return types


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


def accelerated() -> tuple[str, ...]:
    """Return the backends that ``auto`` may take besides the dense one."""
    return tuple(name for name in BACKENDS if get_backend(name).accelerated)


def rounding_for(backend: str) -> Rounding:
    """Return the rounding of INT8 weights with which a backend is measured."""
    return "6bit" if get_backend(backend).bits == 6 else "absmax"
