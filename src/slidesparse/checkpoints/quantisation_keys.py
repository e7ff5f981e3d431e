"""Allowed keys of a ``quantization_config``, and which values do not change the result.

A program that ignores a key may compute wrong results: a ``transform_config`` rotates the input of every layer. The
keys are compressed-tensors' (quantization/quant_{config,scheme,args}.py) and transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from slidesparse.errors import CheckpointError

FROM_FLOAT = "start from the model as it was before it was quantised"
KEYS = ("quantization_config", "compression_config")
"""Keys of a config.json for it; the second is the name in old files."""

Known = Mapping[str, Collection[Any] | None]
"""Key -> its allowed values; None: all, since it is read elsewhere or only documents the making of values."""

FORMAT: Known = {"format": (None, "int-quantized", "float-quantized", "naive-quantized")}
TOP: Known = {
    **dict.fromkeys(("quant_method", "config_groups", "ignore", "quantization_status", "version")),
    **dict.fromkeys(("global_compression_ratio", "use_optimized_inference")),
    **dict.fromkeys(("transform_config", "sparsity_config"), (None, {})),
    **dict.fromkeys(("kv_cache_scheme", "moe_sparsity_config"), (None,)),
    **{"dequantize": (None, False), "run_compressed": (None, True)},
}
GROUP: Known = {"targets": None, "weights": None, "input_activations": None, "output_activations": (None,)}
BOTH: Known = {
    **{"num_bits": (8,), "type": ("int", "float"), "symmetric": (True,), "group_size": (None, -1)},
    **dict.fromkeys(("zp_dtype", "observer", "observer_kwargs")),
    **{"block_structure": (None,), "scale_dtype": (None,), "actorder": (None, False, "weight", "static")},
}
PARTS: Mapping[str, Known] = {
    "weights": {**BOTH, "strategy": ("channel",), "dynamic": (False,)},
    "input_activations": {**BOTH, "strategy": ("token",), "dynamic": (True,)},
}
DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": None, "dynamic": False}
OF_A_SCHEME = frozenset({*DEFAULTS, *FORMAT, "group_size", "block_structure", "scale_dtype"})
"""Keys that have more values in other programs, for schemes that are not ours."""

BITNET: Known = {
    **dict.fromkeys(("quant_method", "linear_class", "quantization_mode", "rms_norm_eps")),
    **{"modules_to_not_convert": (None, [], ["lm_head"]), "use_rms_norm": (None, False)},
}


def refuse_keys(value: Mapping[str, Any], but: Collection[str] = ()) -> None:
    """Raise a CheckpointError for an unsupported key or value, ``but`` for some keys."""
    for place, part, known in _parts(value):
        for key, one in part.items():
            if (allowed := known.get(key, ())) is not None and one not in allowed and key not in but:
                needed = " or ".join(map(json.dumps, allowed)) or "no such key, which may change the result"
                got = f"{place}{key} {one!r:.80}"
                raise CheckpointError("quantisation scheme of the source", got=got, needed=needed, remedy=FROM_FLOAT)


def _parts(value: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Known]]:
    """Yield each part of a known ``quantization_config``: its path, its value, and its allowed keys."""
    if value.get("quant_method") == "bitnet":
        yield "", value, BITNET
    if value.get("quant_method") == "compressed-tensors":
        yield "", value, {**TOP, **FORMAT}
        for name, group in _object(value.get("config_groups") or {}, "config_groups").items():
            yield f"{name}.", _object(group, "a config group"), {**GROUP, **FORMAT}
            for part, known in PARTS.items():
                yield f"{name}.{part}.", {**DEFAULTS, **_object(group.get(part) or {}, part)}, known


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} of quantization_config", got=f"{value!r:.80}", needed="an object")
    return value
