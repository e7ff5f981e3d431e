"""Write config.json of a pruned checkpoint: the source's, with the marker and the quantisation of what was treated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slidesparse.checkpoints.marker import Marker, source_quantisation
from slidesparse.checkpoints.stored_ties import config_as_stored
from slidesparse.files.source_files import without_code
from slidesparse.files.stored import STORED_NAMES
from slidesparse.models.config_keys import MARKER_KEY, QUANTIZATION_KEY, quantization_config
from slidesparse.models.parts import text_config
from slidesparse.models.targets import Targets, treated_head
from slidesparse.models.unused_linears import entries_for_unused
from slidesparse.offline.source import Source
from slidesparse.offline.storage import Storage
from slidesparse.offline.treated_experts import TreatedExperts
from slidesparse.weights.pattern import DENSE, Pattern


def new_config(
    source: Source,
    storage: Storage,
    common: Pattern,
    targets: Targets,
    patterns: Mapping[str, Pattern],
    experts: TreatedExperts,
    expert_patterns: Mapping[str, Pattern],
) -> dict[str, Any]:
    """Return the new config.json; ``common`` is the pattern of which ``patterns`` of linears may be exceptions."""
    checkpoint, meta = source.checkpoint, source.meta

    def in_8_bits(name: str) -> bool:
        return any(checkpoint.stored(one).dtype == STORED_NAMES[storage.dtype] for one in source.tensors(name))

    def hub_names(names: Iterable[str]) -> list[str]:
        """Return the checkpoint's own names of linears, which programs may know instead of transformers' names."""
        origins = [meta.names.origins.get(f"{name}.weight") for name in names]
        stored = [origin.removesuffix(".weight") for origin in origins if isinstance(origin, str)]
        return [name for name in stored if name not in {*names, *patterns}]

    # Linears that a quantised source has in 8 bits stay in 8 bits, also where they are not pruned.
    quantised = [name for name in targets.dense if in_8_bits(name)] if storage.source else []
    ignore = [name for name in {**targets.dense, **source.routers} if name not in quantised]
    ignore += hub_names(source.routers)
    unused = _unused_entries(source)
    # Programs would take these for pruned ones. Experts are named one by one where they are pruned.
    without = dict.fromkeys([*ignore, *(entry for entry in unused if not entry.startswith("re:"))])
    exceptions = {name: pattern for name, pattern in patterns.items() if pattern != common}
    exceptions |= dict.fromkeys(quantised, DENSE)
    marker = Marker(common, tuple(without), exceptions, experts.marker(expert_patterns))
    config = config_as_stored(without_code(checkpoint.config), meta.model, meta.names)
    config.pop("compression_config", None)
    if storage.source is None:
        config.pop(QUANTIZATION_KEY, None)
    if storage.rounds:
        entries = dict.fromkeys([*ignore, *hub_names(ignore), *experts.ignore_entries(), *unused])
        head = treated_head(meta.model, targets.linears)
        config[QUANTIZATION_KEY] = quantization_config(storage.dtype, entries, head)
    elif storage.source is not None:
        kept = source_quantisation(checkpoint.config).items()
        config[QUANTIZATION_KEY] = {key: value for key, value in kept if key != "sparsity_config"}
    return {**config, MARKER_KEY: marker.to_config()}


def _unused_entries(source: Source) -> list[str]:
    """Return entries of an ignore list for linears that transformers does not use, and other programs may."""
    unused = source.meta.names.unused
    shapes = {name: source.checkpoint.stored(name).shape for name in unused}
    layers = getattr(text_config(source.meta.model.config), "num_hidden_layers", None)
    return entries_for_unused(shapes, source.checkpoint.files.keys() - set(unused), layers)
