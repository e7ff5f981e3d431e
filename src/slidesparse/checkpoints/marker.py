"""Read two keys of a checkpoint's config.json: ``slidesparse_config`` and ``quantization_config``.

A checkpoint of ours is an ordinary compressed-tensors one with our key added at the top, which other programs ignore::

    "slidesparse_config": {
      "version": 1,
      "pattern": "6:8",
      "ignore": ["lm_head"],
      "layers": {"model.layers.0.mlp.down_proj": "8:10"}
    }

``ignore`` lists every linear that was left alone. ``layers`` lists exceptions to ``pattern``, by exact name; a layer
that is quantised but not pruned is ``"dense"``. Unknown keys and versions are errors: a reader that skips them might
compute wrong results.

A mixture of experts has version 2 and one key more, ``experts``, which names all experts that were treated::

    "experts": {"model.layers.0.mlp.experts.*.gate_proj": "6:8", ...}

Its names are those of the checkpoint's tensors without ``.weight``, with ``*`` in the place of an expert's number; a
tensor that holds all experts of a layer has its own name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from slidesparse.base.typed_json import decode
from slidesparse.checkpoints.quantisation_keys import FROM_FLOAT, KEYS, OF_A_SCHEME, PARTS, refuse_keys
from slidesparse.errors import CheckpointError, InputError
from slidesparse.models.config_keys import (
    EXPERTS_VERSION,
    LINEAR,
    MARKER_KEY,
    MARKER_VERSION,
    head_target,
    marker_config,
)
from slidesparse.weights.pattern import Pattern

_HEAD = re.compile(re.escape(head_target("NAME")).replace("NAME", r"\w+"))
"""Any value of :func:`slidesparse.models.config_keys.head_target`."""


@dataclass(frozen=True)
class _Stored:
    """The value of the key."""

    version: int
    pattern: str
    ignore: tuple[str, ...]
    layers: dict[str, str]
    experts: dict[str, str]


@dataclass(frozen=True)
class Marker:
    """The sparsity of a checkpoint.

    Attributes:
        pattern: The common pattern.
        ignore: Linears that were left alone, by exact name.
        layers: Exact name -> pattern, where it is not the common one.
        experts: Name of experts' weights -> pattern, of all that were treated.
    """

    pattern: Pattern
    ignore: tuple[str, ...] = ()
    layers: Mapping[str, Pattern] = field(default_factory=dict)
    experts: Mapping[str, Pattern] = field(default_factory=dict)

    def pattern_of(self, name: str) -> Pattern:
        """Return the pattern of a treated layer."""
        return self.layers.get(name, self.pattern)

    def to_config(self) -> dict[str, Any]:
        """Return the value of the key, ready for JSON."""
        return marker_config(self.pattern, self.ignore, self.layers, self.experts)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Marker | None:
        """Read the key from a whole config.json, None where there is none; a CheckpointError where it is invalid."""
        value = config.get(MARKER_KEY)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise CheckpointError(MARKER_KEY, got=type(value).__name__, needed="an object")
        version, known = value.get("version"), (MARKER_VERSION, EXPERTS_VERSION)
        if type(version) is not int or version not in known:
            raise CheckpointError(
                f"version of {MARKER_KEY}",
                got=repr(version),
                needed=" or ".join(map(str, known)),
                remedy="upgrade slidesparse" if type(version) is int else "make the checkpoint again with prune",
            )
        try:
            whole = {"experts": {}, **value} if version == MARKER_VERSION else dict(value)
            stored: _Stored = decode(_Stored, whole, "marker")
            layers, experts = (
                {name: Pattern.parse(text) for name, text in several.items()}
                for several in (stored.layers, stored.experts)
            )
            return cls(Pattern.parse(stored.pattern), stored.ignore, layers, experts)
        except InputError as error:
            remedy = "prune the model again, at a pattern such as 6:8"
            raise CheckpointError(f"{MARKER_KEY}: {error}", remedy=remedy) from error

    @classmethod
    def require(cls, config: Mapping[str, Any], path: object) -> Marker:
        """Read the key as :meth:`from_config`; where it is missing, the error names the checkpoint's ``path``."""
        marker = cls.from_config(config)
        if marker is None:
            raise CheckpointError(
                f"{path} has no {MARKER_KEY}",
                remedy="make one with: slidesparse prune SRC DST --pattern 6:8",
            )
        return marker


def source_quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``quantization_config`` of a config.json (``compression_config`` in old files), or an empty one.

    Raises:
        CheckpointError: It is no object, or its ``ignore`` is no list of names.
    """
    value: Any = next((config[key] for key in KEYS if config.get(key)), {})
    if not isinstance(value, Mapping):
        raise CheckpointError("quantization_config", got=type(value).__name__, needed="an object")
    _require_names("ignore", value.get("ignore") or [])
    return value


def is_bitnet(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a BitNet model, whose master has weights in a float type."""
    return source_quantisation(config).get("quant_method") == "bitnet"


def check_quantisation(config: Mapping[str, Any], types: Set[str]) -> None:
    """Refuse a quantisation that does not fit the tensors' types, or that we follow in part."""
    value = source_quantisation(config)
    if value and types <= {"BF16", "F16", "F32", "F64"} and not is_bitnet(config):
        got = f"{_method(value)} in config.json, and all weights in {' or '.join(sorted(types))}"
        remedy = "remove quantization_config from config.json: it is of other weights"
        raise CheckpointError("quantisation of the source", got=got, remedy=remedy)
    refuse_keys(value, but=OF_A_SCHEME)


def _method(value: Mapping[str, Any]) -> str:
    words = [str(value[key])[:80] for key in ("quant_method", "quant_algo") if value.get(key) is not None]
    return " ".join(words) or "no quant_method"


def quantisation_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the weight type of a compressed-tensors W8A8 checkpoint, or None for one that is not quantised.

    Raises:
        CheckpointError: The scheme is not supported.
    """
    value = source_quantisation(config)
    if not value:
        return None
    groups = value.get("config_groups") or {}
    if value.get("quant_method") != "compressed-tensors" or not groups:
        got = _method(value) + (" without config_groups" if value.get("quant_method") == "compressed-tensors" else "")
        needed = "none, or compressed-tensors W8A8"
        raise CheckpointError("quantisation of the source", got=got, needed=needed, remedy=FROM_FLOAT)
    refuse_keys(value)
    group = next(iter(groups.values()))
    types, targets = {(group[part] or {}).get("type", "int") for part in PARTS}, group.get("targets")
    _require_names("targets", targets)
    known = targets[:1] == [LINEAR] and len(targets) < 3 and all(map(_HEAD.fullmatch, targets[1:]))
    if len(groups) > 1 or len(types) > 1 or not known:
        got = f"{len(groups)} config_groups, of type {' and '.join(sorted(types))}, targets {', '.join(targets)[:200]}"
        needed = f"one group of one type, whose target is {LINEAR}, perhaps with the output embedding"
        raise CheckpointError("quantisation scheme of the source", got=got, needed=needed, remedy=FROM_FLOAT)
    return torch.int8 if types == {"int"} else torch.float8_e4m3fn


def other_quantisation(config: Mapping[str, Any]) -> CheckpointError | None:
    """Return the error for an unsupported quantisation in a config.json; None for ours, BitNet's and none."""
    try:
        quantisation_dtype(config)
    except CheckpointError as error:
        return None if is_bitnet(config) else error
    return None


def _require_names(key: str, value: Any) -> None:
    """Raise a CheckpointError, which shows the first wrong entry, for anything but a list of names."""
    wrong = [one for one in value if not isinstance(one, str)][:1] if isinstance(value, list) else [value]
    if wrong:
        raise CheckpointError(f"{key} of quantization_config", got=f"{wrong[0]!r:.80}", needed="a list of names")
