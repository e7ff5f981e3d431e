"""Find the experts of a mixture that are treated: each is a linear, pruned and quantised on its own.

Pruned without quantising they keep names and shapes. Quantised ones are one tensor an expert with a scale for each
channel, as vLLM reads them: those that share a tensor are cut into such.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from slidesparse.checkpoints.expert_tensors import ExpertTensor, find_expert_tensors, marker_name
from slidesparse.checkpoints.single_experts import single_experts
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.files.stored import STORED_NAMES
from slidesparse.models.experts import LEAVE_DENSE, ignore_entries
from slidesparse.models.targets import IGNORED, matches_entry
from slidesparse.offline.prune_options import PruneOptions, check_type
from slidesparse.offline.source import Source
from slidesparse.offline.storage import Storage
from slidesparse.offline.treated import unless_named
from slidesparse.weights.pattern import Pattern


@dataclass(frozen=True)
class TreatedExperts:
    """The experts of a checkpoint, sorted into those to be treated and the rest.

    Attributes:
        source: The checkpoint.
        storage: The form in which they will be stored.
        tensors: Tensor of the source -> what it holds, of all experts; empty where none is treated.
        dense: One kind of experts' weights that is left alone -> why.
    """

    source: Source
    storage: Storage
    tensors: dict[str, ExpertTensor]
    dense: dict[str, str]

    @cached_property
    def treated(self) -> dict[str, ExpertTensor]:
        """The tensors of experts that are treated."""
        return {name: tensor for name, tensor in self.tensors.items() if tensor.layer not in self.dense}

    @cached_property
    def layers(self) -> list[str]:
        """The kinds of experts' weights that are treated, by the names under which they are pruned."""
        return list(dict.fromkeys(one.layer for one in self.treated.values()))

    def becomes(self, tensor: str) -> list[list[str]]:
        """Return the tensors that each expert in a tensor of the source becomes; gate and up may be cut apart."""
        shape = self.source.checkpoint.stored(tensor).shape
        single = single_experts(type(self.source.meta.model).__name__, tensor)
        if not self.storage.quantised or len(shape) == 2 or single is None:
            return [[tensor]] * (1 if len(shape) == 2 else shape[0])
        return [single.names(tensor, expert) for expert in range(shape[0])]

    def ignore_entries(self) -> list[str]:
        """Return entries of a quantisation's ignore list for the experts that it leaves alone."""
        if not self.layers:
            return ignore_entries([one.name for one in self.source.experts], every=True)
        left = {name: tensor for name, tensor in self.tensors.items() if tensor.layer in self.dense}
        hub = [marker_name(name, 2).partition(".*.")[0] for name in left if self.source.is_one_expert(name)]
        return ignore_entries([*(one.experts.name for one in left.values()), *hub], every=False)

    def marker(self, patterns: dict[str, Pattern]) -> dict[str, Pattern]:
        """Return what the new marker says of the experts."""
        return {
            marker_name(part, 3 if part == name and not self.source.is_one_expert(name) else 2): patterns[tensor.layer]
            for name, tensor in self.treated.items()
            for part in self.becomes(name)[0]
        }


def marked_experts(source: Source) -> dict[str, Pattern]:
    """Return the patterns that the marker of a pruned source has for kinds of experts' weights."""
    if source.marker is None:
        return {}
    names = {
        layer: marker_name(tensor, 2 if source.is_one_expert(tensor) else 3)
        for layer, tensors in source.expert_layers.items()
        for tensor in tensors
    }
    known = source.marker.experts
    return {layer: known[name] for layer, name in names.items() if name in known}


def find_treated_experts(source: Source, options: PruneOptions, storage: Storage) -> TreatedExperts:
    """Sort the experts of a checkpoint, and refuse what they, or servers that read them, cannot follow.

    Raises:
        InputError: An option is not for experts, or treats only some where servers have one form for all.
        UnsupportedError: They cannot be quantised as they are stored, or nobody can tell how they multiply.
    """
    names = list(source.expert_layers)
    marked = names if source.marker is None else marked_experts(source)
    left = unless_named((name for name in names if name not in marked), options.layers)
    dense = {name: IGNORED for name in names for entry in (*options.ignore, *left) if matches_entry(name, entry)}
    if options.part == "vision":
        dense |= dict.fromkeys(names, "in the language model")
    tensors = find_expert_tensors(source.meta, source.checkpoint) if len(dense) < len(names) else {}
    for name, tensor in tensors.items():  # nothing is rounded in a quantised source
        if storage.source and source.checkpoint.stored(name).dtype != STORED_NAMES[storage.source]:
            dense.setdefault(tensor.layer, "not quantised in the source, which is")
    found = TreatedExperts(source, storage, tensors, dense)
    if options.recipe == "ternary" and found.layers:
        raise InputError("the ternary recipe is not for experts", got=found.layers[0], remedy=f"add {LEAVE_DENSE}")
    for name, tensor in found.treated.items():
        check_type(name, source.checkpoint.stored(name), storage.source, storage.dtype)
        if storage.quantised:
            _require_quantisable(found, name, tensor)
    if storage.quantised and found.layers:
        _refuse_part_of_a_layer(found)
    return found


def _require_quantisable(found: TreatedExperts, name: str, tensor: ExpertTensor) -> None:
    shape = list(found.source.checkpoint.stored(name).shape)
    if found.source.is_one_expert(name):
        fits = not tensor.transposed and name.endswith(".weight")
    else:
        fits = found.storage.rounds and single_experts(type(found.source.meta.model).__name__, name) is not None
    if not fits:
        raise UnsupportedError(
            f"experts that are stored as {name} cannot be quantised",
            got=f"one tensor {shape}" if len(shape) == 3 else f"{shape}",
            needed="experts that vLLM reads as one tensor each [out, in], where it knows scales",
            remedy=f"use --dtype bf16, which keeps them as they are stored, or add {LEAVE_DENSE}",
        )


def _refuse_part_of_a_layer(found: TreatedExperts) -> None:
    """Refuse experts of which some are quantised and some not, where servers have one type or one form for all."""
    left = [tensor.layer for tensor in found.tensors.values() if tensor.layer in found.dense]
    if left and not all(map(found.source.is_one_expert, found.tensors)):
        raise InputError(
            "experts of some layers are left alone, and others are quantised to one tensor an expert",
            got=left[0],
            needed="all of the model, or none: vLLM reads experts in one form",
        )
    for one in found.source.experts:
        here = [one.layer(leaf) for leaf in one.weights]
        left = [layer for layer in here if layer in found.dense]
        if left and len(left) < len(here):
            raise InputError(
                "some experts' weights of a layer are left alone and some are quantised",
                got=", ".join(left),
                needed="all of a layer, or none",
            )
