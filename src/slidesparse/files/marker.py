"""Read two keys of a checkpoint's config.json: ``slidesparse_config`` and ``quantization_config``.

A checkpoint of ours is an ordinary compressed-tensors one with our key added at the top, which other programs ignore::

    "slidesparse_config": {
      "version": 1,
      "pattern": "6:8",
      "ignore": ["lm_head"],
      "layers": {"model.layers.0.mlp.down_proj": "8:10"}
    }

``ignore`` lists every linear that was left alone. ``layers`` lists exceptions to ``pattern``, by exact name; a layer
that is quantised but not pruned is ``"dense"``. Unknown keys and versions are errors: a reader that skips them would
compute something else than the writer meant.

A mixture of experts has version 2 and one key more, ``experts``, which names all experts that were treated::

    "experts": {"model.layers.0.mlp.experts.*.gate_proj": "6:8", ...}

Its names are those of the checkpoint's tensors without ``.weight``, with ``*`` in the place of an expert's number; a
tensor that holds all experts of a layer has its own name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slidesparse.base.typed_json import decode
from slidesparse.errors import CheckpointError, InputError
from slidesparse.files.quantisation_keys import FROM_FLOAT, KEYS
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
"""What :func:`slidesparse.models.config_keys.head_target` returns, of any name."""


@dataclass(frozen=True)
class _Stored:
    """The value of the key."""

    version: int
    pattern: str
    ignore: tuple[str, ...]
    layers: dict[str, str]


@dataclass(frozen=True)
class _StoredWithExperts(_Stored):
    """The value of the key, of a mixture whose experts were treated."""

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
        """Read the key from a whole config.json; None when it is not there.

        Raises:
            CheckpointError: Unknown version, unknown or missing key, or a value of the wrong kind.
        """
        value = config.get(MARKER_KEY)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise CheckpointError(MARKER_KEY, got=type(value).__name__, needed="an object")
        kinds: dict[object, type[_Stored]] = {MARKER_VERSION: _Stored, EXPERTS_VERSION: _StoredWithExperts}
        version = value.get("version")
        if type(version) is not int or version not in kinds:
            raise CheckpointError(
                f"version of {MARKER_KEY}",
                got=repr(version),
                needed=" or ".join(map(str, kinds)),
                remedy="upgrade slidesparse" if type(version) is int else "make the checkpoint again with prune",
            )
        try:
            stored: _Stored = decode(kinds[version], dict(value), "marker")
            exceptions = {name: Pattern.parse(text) for name, text in stored.layers.items()}
            experts = {name: Pattern.parse(text) for name, text in getattr(stored, "experts", {}).items()}
            return cls(Pattern.parse(stored.pattern), stored.ignore, exceptions, experts)
        except InputError as error:
            raise CheckpointError(f"{MARKER_KEY}: {error}") from error

    @classmethod
    def require(cls, config: Mapping[str, Any], path: object) -> Marker:
        """Read the key, which must be there, as :meth:`from_config`; the error names the checkpoint's ``path``."""
        marker = cls.from_config(config)
        if marker is None:
            raise CheckpointError(
                f"{path} has no {MARKER_KEY}",
                remedy="make one with: slidesparse prune SRC DST --pattern 6:8 --dtype int8",
            )
        return marker


def source_quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``quantization_config`` of a config.json (``compression_config`` in old files), or an empty one.

    Raises:
        CheckpointError: It is no object, or its ``ignore`` is no list of names.
    """
    value = next((config[key] for key in KEYS if config.get(key)), {})
    if not isinstance(value, Mapping):
        raise CheckpointError("quantization_config", got=type(value).__name__, needed="an object")
    ignore = value.get("ignore")
    for entry in () if ignore is None else ignore if isinstance(ignore, list) else [ignore]:
        if not isinstance(ignore, list) or not isinstance(entry, str):
            raise CheckpointError("ignore of quantization_config", got=f"{entry!r:.80}", needed="a list of names")
    return value


def is_bitnet(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a BitNet model, whose master has weights in a float type."""
    return source_quantisation(config).get("quant_method") == "bitnet"


def quantisation_words(config: Mapping[str, Any]) -> str:
    """Return what a ``quantization_config`` calls its method."""
    value = source_quantisation(config)
    words = [str(value[key])[:80] for key in ("quant_method", "quant_algo") if value.get(key) is not None]
    return " ".join(words) or "no quant_method"


def quantisation_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the weight type of a compressed-tensors W8A8 checkpoint, or None for one that is not quantised.

    Raises:
        CheckpointError: The scheme is one that we do not treat, or there is a ``sparsity_config`` (vLLM refuses those).
    """
    value = source_quantisation(config)
    if not value:
        return None
    if value.get("sparsity_config"):
        raise CheckpointError(
            "the checkpoint has a sparsity_config, which vLLM no longer loads",
            remedy="remove the key when its format is dense, else start from the uncompressed checkpoint",
        )

    def other(what: str, got: str, needed: str = "none, or compressed-tensors W8A8 of one type") -> CheckpointError:
        return CheckpointError(f"quantisation {what}of the source", got=got, needed=needed, remedy=FROM_FLOAT)

    words, groups = quantisation_words(config), value.get("config_groups") or {}
    if value.get("quant_method") != "compressed-tensors":
        raise other("", words)
    if not isinstance(groups, Mapping) or not groups:
        raise other("", f"{words}, {f'config groups {groups!r:.80}' if groups else '0 config groups'}")
    found = {name: _Scheme.of(_object(group, "a config group"), value.get("format")) for name, group in groups.items()}
    for name, scheme in found.items():
        if wrong := scheme.wrong():
            needed = "8-bit symmetric channel-wise weights and dynamic per-token activations"
            raise other("scheme ", f"{', '.join(wrong)} in {name}", needed)
    if len(types := {scheme.dtype for scheme in found.values()}) > 1:
        raise other("", f"{words}, {len(types)} types in {len(found)} config groups")
    targets = quantised_targets(value)
    if not _are_linears(targets):
        raise other("scheme ", f"targets {', '.join(targets)[:200]}", f"{LINEAR}, or names of linears")
    return types.pop()


@dataclass(frozen=True)
class _Scheme:
    """What a config group says, with compressed-tensors' defaults for what it leaves out."""

    weights: Mapping[str, Any]
    input_activations: Mapping[str, Any]
    format: object

    @classmethod
    def of(cls, group: Mapping[str, Any], common_format: object) -> _Scheme:
        parts = []
        for key in ("weights", "input_activations"):
            said = _object(group.get(key) or {}, key)
            by_row = "channel" if said.get("group_size") == -1 else None
            usual = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "group_size": None}
            part = {**usual, **said, "strategy": said.get("strategy") or by_row} if said else {}
            parts.append({**part, "group_size": None} if by_row else part)
        return cls(*parts, group.get("format") or common_format)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.weights.get("type") == "float" else torch.int8

    def wrong(self) -> list[str]:
        """Return what is not as we need it, in words."""
        kind = "float" if self.dtype == torch.float8_e4m3fn else "int"
        common = {"num_bits": 8, "type": kind, "symmetric": True, "group_size": None}
        needed = {
            "weights": {**common, "strategy": "channel", "dynamic": False},
            "input_activations": {**common, "strategy": "token", "dynamic": True},
        }
        found = [f"no {part}" for part in needed if not getattr(self, part)]
        for part, wanted in needed.items() if not found else ():
            said = getattr(self, part)
            found += [f"{part}.{key} {said[key]!r:.40}" for key, value in wanted.items() if said[key] != value]
        formats = (None, f"{kind}-quantized", "naive-quantized")
        return found + ([] if self.format in formats else [f"format {self.format!r:.40}"])


def quantised_targets(value: Mapping[str, Any]) -> list[str]:
    """Return what the groups of a ``quantization_config`` name: classes, layers, or regular expressions of them."""
    targets: list[str] = []
    for group in (value.get("config_groups") or {}).values():
        named = group.get("targets")
        if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
            raise CheckpointError("targets of quantization_config", got=f"{named!r:.80}", needed="a list of names")
        targets += named
    return list(dict.fromkeys(targets))


def _are_linears(targets: list[str]) -> bool:
    """Return whether targets are all linears, perhaps with the output embedding, or name some of them."""
    others = [target for target in targets if target != LINEAR]
    is_head = len(others) == 1 and _HEAD.fullmatch(others[0]) is not None
    if LINEAR in targets:
        return not others or is_head
    return bool(others) and not is_head and not any(target[:1].isupper() for target in others)


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} of quantization_config", got=f"{value!r:.80}", needed="an object")
    return value
