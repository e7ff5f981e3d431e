"""Select the linears and experts of a checkpoint to treat, by its model, a run of that, and its files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from slidesparse.checkpoints.check_tensors import left_alone
from slidesparse.checkpoints.expert_tensors import ExpertTensor, find_expert_tensors
from slidesparse.checkpoints.single_experts import single_experts
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.files.stored import STORED_NAMES
from slidesparse.models.experts import LEAVE_DENSE
from slidesparse.models.float_linears import float_heads, heads_of_tasks, linears_of_float_mixers
from slidesparse.models.parts import output_embedding
from slidesparse.models.targets import IGNORED, Targets, find_targets, matches_entry, treated_head
from slidesparse.models.weight_reads import read_without_calling
from slidesparse.offline.prune_options import PruneOptions, check_type
from slidesparse.offline.source import Source
from slidesparse.offline.storage import Storage


@dataclass(frozen=True)
class Treated:
    """The treated linears and experts of a checkpoint.

    Attributes:
        linears: Its linears outside of experts, sorted into those to be treated and the rest.
        unless_ignored: Linears that would be treated without any ignore list.
        experts: Tensor of treated experts -> its contents.
        experts_left: The same for experts left alone; empty where all are.
        dense: Linear, router or kind of experts' weights left alone -> reason.
    """

    linears: Targets
    unless_ignored: dict[str, nn.Linear]
    experts: dict[str, ExpertTensor]
    experts_left: dict[str, ExpertTensor]
    dense: dict[str, str]

    @property
    def layers(self) -> list[str]:
        """The treated linears and kinds of experts' weights."""
        return [*self.linears.linears, *dict.fromkeys(one.layer for one in self.experts.values())]


def find_treated(source: Source, options: PruneOptions, storage: Storage) -> Treated:
    """Sort linears and experts into those to be treated and the rest, and refuse results that servers cannot read.

    Raises:
        InputError: An option does not fit the model.
        UnsupportedError: Experts cannot be quantised in their stored form, or have an unknown layout.
    """
    why_left, tensors = _experts(source, options, storage)
    treated = {name: tensor for name, tensor in tensors.items() if tensor.layer not in why_left}
    left = {name: tensor for name, tensor in tensors.items() if tensor.layer in why_left}
    if options.rounding == "ternary" and treated:
        layer = next(iter(treated.values())).layer
        raise InputError("the ternary rounding is not for experts", got=layer, remedy=f"add {LEAVE_DENSE}")
    for name, tensor in treated.items():
        check_type(name, source.checkpoint.stored(name), storage.source, storage.dtype)
        if storage.quantised:
            _require_quantisable(source, storage, name, tensor)
    if storage.quantised and treated and left:
        _refuse_part_of_a_layer(source, left, [*tensors])
    targets, unless_ignored = _linears(source, options, storage)
    return Treated(targets, unless_ignored, treated, left, {**targets.dense, **source.routers, **why_left})


def _linears(source: Source, options: PruneOptions, storage: Storage) -> tuple[Targets, dict[str, nn.Linear]]:
    model = source.meta.model
    by_source = left_alone(source.checkpoint.config, source.linears) if storage.source else ()
    others = [*source.expert_layers, *source.routers]  # entries may also match these
    entries = [one for one in options.ignore if _matches(source.linears, one) or not _matches(others, one)]
    keep = {**source.meta.why_stored_otherwise(), **source.routers}

    def find(ignore: Iterable[str]) -> Targets:
        how: Any = {"part": options.part, "keep": keep}
        return find_targets(model, ignore, options.lm_head, by_source, **how)

    keep |= float_heads(model) if storage.rounds and options.lm_head else {}
    found = find(entries).linears  # first: it refuses wrong entries before the model runs
    keep |= read_without_calling(model, find([]).linears, source.run)  # once, for any ignore list
    mixers = linears_of_float_mixers(model) if storage.rounds else {}
    if mixers and found.keys() <= keep.keys() | mixers.keys():
        raise InputError(
            f"no linear of {type(model).__name__} can have 8 bits",
            got=f"nothing left to treat but {len(mixers)} linears of first Mamba mixers, which vLLM holds in floats",
            remedy="prune it with --dtype bf16, fp16 or fp32: the zeros are kept, and vLLM serves it dense",
        )
    keep |= mixers | (heads_of_tasks(model) if storage.rounds else {})
    targets = find(entries)
    head = treated_head(model, targets.linears)
    if options.lm_head and head is None:
        output = output_embedding(model)
        why = (targets.dense.get(name) for name, module in model.named_modules() if module is output)
        got = f"--lm-head, and the output embedding stays dense: {next(why, None) or 'there is none'}"
        raise InputError("options without effect", got=got, remedy="leave out --lm-head")
    marked = () if source.marker is None else source.marker.ignore
    left = [name for name in targets.linears if name in marked and name != head and not _named(name, options)]
    return find([*entries, *left]) if left else targets, find([]).linears


def _matches(names: Iterable[str], entry: str) -> bool:
    return any(matches_entry(name, entry) for name in names)


def _named(name: str, options: PruneOptions) -> bool:
    """Return whether an option names a layer that a pruned source left alone."""
    return any(matches_entry(name, entry) for entry in options.layers)


def _experts(source: Source, options: PruneOptions, storage: Storage) -> tuple[dict[str, str], dict[str, ExpertTensor]]:
    """Return the kinds of experts' weights left alone, with reasons, and the tensors of all experts unless all are."""
    names, marked = list(source.expert_layers), source.marked_experts()
    left = () if source.marker is None else (one for one in names if one not in marked and not _named(one, options))
    ignore = [*options.ignore, *left]
    dense = {name: IGNORED for name in names for entry in ignore if matches_entry(name, entry)}
    if options.part == "vision":
        dense |= dict.fromkeys(names, "in the language model")
    tensors = find_expert_tensors(source.meta, source.checkpoint) if len(dense) < len(names) else {}
    for name, tensor in tensors.items():  # nothing is rounded in a quantised source
        if storage.source and source.checkpoint.stored(name).dtype != STORED_NAMES[storage.source]:
            dense.setdefault(tensor.layer, "not quantised in the source, which is")
    return dense, tensors


def _require_quantisable(source: Source, storage: Storage, name: str, tensor: ExpertTensor) -> None:
    shape = list(source.checkpoint.stored(name).shape)
    alone = not tensor.transposed and name.endswith(".weight")
    shared = storage.rounds and single_experts(type(source.meta.model).__name__, name) is not None
    if not (alone if len(shape) == 2 else shared):
        raise UnsupportedError(
            f"experts that are stored as {name} cannot be quantised",
            got=f"one tensor {shape}" if len(shape) == 3 else f"{shape}",
            needed="experts that vLLM reads as one tensor each [out, in], where it knows scales",
            remedy=f"use --dtype bf16, which keeps them as they are stored, or add {LEAVE_DENSE}",
        )


def _refuse_part_of_a_layer(source: Source, left: dict[str, ExpertTensor], tensors: list[str]) -> None:
    """Refuse partly quantised experts where servers have one type or one form for all."""
    names = list(dict.fromkeys(one.layer for one in left.values()))
    if not all(map(source.is_one_expert, tensors)):
        raise InputError(
            "experts of some layers are left alone, and others are quantised to one tensor an expert",
            got=names[0],
            needed="all of the model, or none: vLLM reads experts in one form",
        )
    for one in source.experts:
        here = [layer for leaf in one.weights if (layer := one.layer(leaf)) in names]
        if here and len(here) < len(one.weights):
            raise InputError(
                "some experts' weights of a layer are left alone and some are quantised",
                got=", ".join(here),
                needed="all of a layer, or none",
            )
