"""Map the parameters of a model to the tensors of a checkpoint, as transformers loads them.

Names on the hub are as old as the model; every release of transformers renames, joins and splits tensors while it
loads. So transformers loads the checkpoint here, by its public ``from_pretrained``, with tensors that have no values
and record their origin.
"""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch

from slidesparse.base.other_libraries import quiet_transformers
from slidesparse.base.traced_tensor import Origin, TracedTensor, origin_of, sources
from slidesparse.checkpoints.single_experts import joined
from slidesparse.files.stored import STORED_NAMES, Stored


@dataclass(frozen=True)
class TensorNames:
    """Sources of the values of a model's state in a checkpoint.

    Attributes:
        origins: Name in the state -> the checkpoint's tensor, or its computation from several or a part of one.
        tied: Name in the state -> the name whose values it shares; it has an origin where its values are stored too.
        made: Parameter -> its value, where transformers computes it and checkpoints need not hold it.
        missing: Parameters that nothing fills, and that are tied to no filled one.
        unused: Tensors of the checkpoint that fill nothing.
        unexpected: Unused tensors that transformers does not know.
        misshapen: Name in the state -> its differing shape in the checkpoint.
        untied: Parameters that the config ties, and whose values differ.
    """

    origins: Mapping[str, Origin]
    tied: Mapping[str, str]
    made: Mapping[str, torch.Tensor]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: Mapping[str, tuple[int, ...]]
    untied: tuple[str, ...] = ()

    @cached_property
    def used(self) -> set[str]:
        """Tensors of the checkpoint that fill a parameter."""
        return {name for origin in self.origins.values() for name in sources(origin)}


def ask_transformers(known: Any, config: Any, stored: Mapping[str, Stored]) -> TensorNames:
    """Load a checkpoint without its values."""
    scales = {name for name in stored if name.removesuffix("_scale") != name and name.removesuffix("_scale") in stored}
    named = {name: TracedTensor.named(name, one.shape) for name, one in stored.items() if name not in scales}
    state = joined(known.__name__, named)
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers would look for the quantiser's own tensors
    with quiet_transformers(logging.CRITICAL):  # what is missing is reported here
        model, info = _load(known, config, state, ignore_mismatched_sizes=True)
    first: dict[int, str] = {}
    origins: dict[str, Origin] = {}
    tied: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (other := first.setdefault(id(tensor), name)) != name:
            tied[name] = other
        elif (origin := origin_of(tensor)) is not None:
            origins[name] = origin
    used = {name for origin in origins.values() for name in sources(origin)}
    misshapen = {name: tuple(shape) for name, shape, *_ in info["mismatched_keys"]}
    filled, reported = {*origins, *tied, *misshapen}, set(info["missing_keys"])
    unfilled = [name for name, _ in model.named_parameters() if name not in filled]
    missing = [name for name in unfilled if name in reported]
    made = [] if missing else unfilled
    unused = [name for name in named if name not in used]
    return TensorNames(
        origins,
        tied,
        _computed(known, config, state, made) if made else {},
        tuple(missing),
        tuple(unused),
        tuple(_unexpected(unused, info["unexpected_keys"])),
        misshapen,
    )


def transformers_loads(model: Any, quantization: Any, stored: Mapping[str, Stored]) -> bool | None:
    """Return whether transformers loads a quantised checkpoint without values; None: without compressed-tensors."""
    if find_spec("compressed_tensors") is None:
        return None
    types = {name: dtype for dtype, name in STORED_NAMES.items()}
    state = {name: torch.empty(one.shape, dtype=types.get(one.dtype), device="meta") for name, one in stored.items()}
    config = copy.deepcopy(model.config)
    config.quantization_config = dict(quantization)
    try:
        with quiet_transformers(logging.CRITICAL), redirect_stderr(io.StringIO()):  # compressed-tensors draws bars
            _, info = _load(type(model), config, state)
    except Exception:  # a user would see it too
        return False
    return not info["missing_keys"] and not info["mismatched_keys"]


def _computed(known: Any, config: Any, state: Mapping[str, torch.Tensor], names: list[str]) -> dict[str, torch.Tensor]:
    """Return the values of parameters that transformers computes and no checkpoint holds."""
    with quiet_transformers(logging.CRITICAL):
        model, _ = _load(known, config, state, device_map={"": "cpu"})
    return {name: model.get_parameter(name).detach() for name in names}


def _load(known: Any, config: Any, state: Mapping[str, torch.Tensor], **options: Any) -> tuple[Any, Mapping[str, Any]]:
    loaded: tuple[Any, Mapping[str, Any]] = known.from_pretrained(
        None,
        config=config,
        state_dict=dict(state),
        dtype=torch.float32,
        output_loading_info=True,
        **{"device_map": {"": "meta"}, **options},
    )
    return loaded


def _unexpected(unused: list[str], reported: Any) -> Iterator[str]:
    """Yield the unused tensors that transformers reports, under its own names for them.

    It does not report known left-overs of old checkpoints, such as rotary tables and tied embeddings.
    """
    ends = {_end(name) for name in reported}
    return (name for name in unused if _end(name) in ends)


def _end(name: str) -> tuple[str, ...]:
    return tuple(name.split(".")[-2:])
