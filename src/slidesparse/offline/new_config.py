"""The config.json of a pruned checkpoint: the source's, with marker and quantisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slidesparse.checkpoints.expert_tensors import marker_name
from slidesparse.checkpoints.marker import Marker, source_quantisation
from slidesparse.checkpoints.stored_ties import config_as_stored
from slidesparse.files.source_files import without_code
from slidesparse.files.stored import STORED_NAMES
from slidesparse.models.config_keys import MARKER_KEY, QUANTIZATION_KEY, quantization_config
from slidesparse.models.experts import ignore_entries
from slidesparse.models.parts import text_config
from slidesparse.models.targets import treated_head
from slidesparse.models.unused_linears import entries_for_unused
from slidesparse.offline.source import Source
from slidesparse.offline.storage import Storage, TensorJob
from slidesparse.offline.treated import Treated
from slidesparse.weights.pattern import DENSE, Pattern


def new_config(
    source: Source, storage: Storage, common: Pattern, treated: Treated, jobs: Mapping[str, TensorJob]
) -> dict[str, Any]:
    """Return the new config.json; ``common`` is the pattern of treated tensors, but for exceptions."""
    checkpoint, meta, left = source.checkpoint, source.meta, treated.linears.dense

    def hub_names(names: Iterable[str]) -> list[str]:
        """Return the checkpoint's own names of linears, which programs may use instead of transformers' names."""
        origins = (meta.names.origins.get(f"{name}.weight") for name in names)
        stored = (origin.removesuffix(".weight") for origin in origins if isinstance(origin, str))
        return [name for name in stored if name not in {*names, *treated.linears.linears}]

    # Linears that a quantised source has in 8 bits stay in 8 bits, also where they are not pruned.
    types = {name: checkpoint.stored(tensor).dtype for name in left for tensor in source.tensors(name)}
    kept = [name for name in left if storage.source and types.get(name) == STORED_NAMES[storage.source]]
    ignore = [name for name in {**left, **source.routers} if name not in kept]
    ignore += hub_names(source.routers)
    unused = _unused_entries(source)
    # Other programs would take these for pruned. Experts are named one by one where they are pruned.
    without = dict.fromkeys([*ignore, *(entry for entry in unused if not entry.startswith("re:"))])
    linears = {str(job.layer): job.pattern for job in jobs.values() if job.expert is None}
    exceptions = {name: pattern for name, pattern in linears.items() if pattern != common}
    experts = {
        marker_name(name, len(job.outputs[name].shape)): job.pattern
        for job in jobs.values()
        if job.expert is not None
        for name in job.becomes[0]
    }
    marker = Marker(common, tuple(without), exceptions | dict.fromkeys(kept, DENSE), experts)
    config = config_as_stored(without_code(checkpoint.config), meta.model, meta.names)
    config.pop("compression_config", None)
    if storage.source is None:
        config.pop(QUANTIZATION_KEY, None)
    else:
        known = source_quantisation(checkpoint.config).items()
        config[QUANTIZATION_KEY] = {key: value for key, value in known if key != "sparsity_config"}
    if storage.rounds:
        entries = dict.fromkeys([*ignore, *hub_names(ignore), *_expert_entries(source, treated), *unused])
        head = treated_head(meta.model, treated.linears.linears)
        config[QUANTIZATION_KEY] = quantization_config(storage.dtype, entries, head)
    return {**config, MARKER_KEY: marker.to_config()}


def _expert_entries(source: Source, treated: Treated) -> list[str]:
    """Return ignore-list entries for the experts left alone."""
    if not treated.experts:
        return ignore_entries([one.name for one in source.experts], every=True)
    left = treated.experts_left
    hub = [marker_name(name, 2).partition(".*.")[0] for name in left if source.is_one_expert(name)]
    return ignore_entries([*(one.experts.name for one in left.values()), *hub], every=False)


def _unused_entries(source: Source) -> list[str]:
    """Return ignore-list entries for linears that transformers does not use, and other programs may."""
    unused = source.meta.names.unused
    shapes = {name: source.checkpoint.stored(name).shape for name in unused}
    layers = getattr(text_config(source.meta.model.config), "num_hidden_layers", None)
    return entries_for_unused(shapes, source.checkpoint.files.keys() - set(unused), layers)
