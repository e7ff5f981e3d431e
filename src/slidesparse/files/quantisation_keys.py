"""Which keys a ``quantization_config`` may have, and which of their values leave the result as it is.

A program that passes over a key computes something else than the writer meant: a ``transform_config`` turns the input
of every layer. So keys are known by these lists, with the values that change nothing; all others are refused. They are
compressed-tensors' own (quantization/quant_config.py, quant_scheme.py, quant_args.py) and those that transformers adds.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from slidesparse.errors import CheckpointError

FROM_FLOAT = "start from the model as it was before it was quantised"

KEYS = ("quantization_config", "compression_config")
"""Where a config.json has it; the second is the name in old files."""

Known = Mapping[str, Collection[Any] | None]
"""Key -> the values that change nothing; None: all, as the key is read elsewhere or only informs."""

TOP: Known = {
    **dict.fromkeys(("quant_method", "config_groups", "ignore", "format", "sparsity_config")),
    **dict.fromkeys(("quantization_status", "global_compression_ratio", "version", "use_optimized_inference")),
    **{"kv_cache_scheme": (None,), "moe_sparsity_config": (None,), "transform_config": (None, {}, {"config_groups": {}})},
    **{"dequantize": (None, False), "run_compressed": (None, True)},
}
GROUP: Known = {
    **dict.fromkeys(("targets", "weights", "input_activations", "format")),
    "output_activations": (None,),
}
ARGUMENTS: Known = {
    **dict.fromkeys(("num_bits", "type", "symmetric", "strategy", "dynamic", "group_size")),
    **dict.fromkeys(("zp_dtype", "observer", "observer_kwargs")),  # of a symmetric type; of how scales were found
    **{"block_structure": (None,), "scale_dtype": (None,), "actorder": (None, False, "weight", "static")},
}
BITNET: Known = {
    **dict.fromkeys(("quant_method", "linear_class", "quantization_mode", "rms_norm_eps")),
    **{"modules_to_not_convert": (None, [], ["lm_head"]), "use_rms_norm": (None, False)},
}


def refuse_unknown_keys(value: Mapping[str, Any]) -> None:
    """Refuse a ``quantization_config`` of a method that we read with a key, or a value of one, that we do not follow.

    Raises:
        CheckpointError: Naming the first.
    """
    for place, part, known in _parts(value):
        for key, found in part.items():
            allowed = known.get(key, ())
            if allowed is not None and found not in allowed:
                needed = " or ".join(map(json.dumps, allowed)) or "no such key: it may change the result"
                what = f"{place}{key} of quantization_config"
                raise CheckpointError(what, got=f"{found!r:.80}", needed=needed, remedy=FROM_FLOAT)


def _parts(value: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Known]]:
    """Yield where each part of the value is, the part, and its known keys; parts of a wrong kind are refused later."""
    method, groups = value.get("quant_method"), value.get("config_groups")
    if method == "bitnet":
        yield "", value, BITNET
    if method != "compressed-tensors":
        return
    yield "", value, TOP
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            place = f"config_groups.{name}."
            yield place, group, GROUP
            for key in ("weights", "input_activations"):
                if isinstance(group.get(key), Mapping):
                    yield f"{place}{key}.", group[key], ARGUMENTS


def refuse_other_places(config: Mapping[str, Any]) -> None:
    """Refuse a ``quantization_config`` in a part of config.json, or a second one that says something else.

    Raises:
        CheckpointError: Naming its place.
    """
    top = [config[key] for key in KEYS if config.get(key)]
    for place, value in _everywhere(config):
        if value not in top[:1]:
            got = f"another one than {KEYS[0]}" if top else f"{value!r:.80}"
            remedy = f"move it to the top of config.json, as {KEYS[0]}" if not top else "remove the one that is not meant"
            raise CheckpointError(f"{place} of config.json", got=got, needed=f"one {KEYS[0]}", remedy=remedy)


def _everywhere(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if key in KEYS and value:
            yield f"{place}{key}", value
        elif isinstance(value, Mapping):
            yield from _everywhere(value, f"{place}{key}.")
