"""The sizes of a model's linears, as a server runs them: of a model that is known by name, or of a local checkpoint.

A server merges the linears of one module that read the same input: q, k and v, gate and up. They are found by running
the model once on the meta device, as for pruning, so an architecture needs no table of names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slidesparse.errors import InputError, UnsupportedError
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.marker import Marker
from slidesparse.files.meta_model import MetaModel, build_meta_model
from slidesparse.files.stored import STORED_NAMES
from slidesparse.models.sparsify import run_once
from slidesparse.models.targets import find_targets, input_sets
from slidesparse.offline.known_models import LAYERS, MODELS, TYPES
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import DTYPES


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


def shapes_of(model: str) -> ModelShapes:
    """Return the sizes of a model.

    Raises:
        InputError: It is neither.
        CheckpointError: The checkpoint is damaged or of an unknown architecture.
        UnsupportedError: Its weights have a type that is not measured.
    """
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
    """Return the linears that a server runs as one: those of one module that read the same input."""
    run = run_once(meta.model)
    known = dict(meta.model.named_modules())
    linears = {name: known[name] for name in names}
    found: dict[tuple[int, str], list[str]] = {}
    sets = [[name] for name in names] if run is None else input_sets(meta.model, linears, run)
    for number, together in enumerate(sets):
        for name in together:
            found.setdefault((number, name.rpartition(".")[0]), []).append(name)
    return list(found.values())


def _dtypes(checkpoint: Checkpoint, meta: MetaModel, names: Sequence[str], marker: Marker | None) -> tuple[str, ...]:
    """Return the type of a pruned or quantised checkpoint's weights; a float one without a marker may become any."""
    stored = {checkpoint.stored(f"{meta.prefix(name)}.weight").dtype for name in names}
    known = {STORED_NAMES[dtype]: name for name, dtype in DTYPES.items()}
    found = tuple(known.get(text, text) for text in sorted(stored))
    if marker is None and not set(found) & {"int8", "fp8"}:
        return ()
    if not set(found) <= set(TYPES):
        raise UnsupportedError("type of the weights to tune", got=", ".join(found), needed=", ".join(TYPES))
    return found
