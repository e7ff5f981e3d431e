"""Find the linears of a checkpoint that are treated: by what its model, a run of that and its files show."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import nn

from slidesparse.checkpoints.check_tensors import left_alone
from slidesparse.errors import InputError
from slidesparse.models.float_linears import float_heads, linears_of_float_mixers
from slidesparse.models.parts import output_embedding
from slidesparse.models.targets import Targets, find_targets, matches_entry, treated_head
from slidesparse.models.weight_reads import read_without_calling
from slidesparse.offline.prune_options import PruneOptions
from slidesparse.offline.source import Source
from slidesparse.offline.storage import Storage


def find_treated(source: Source, options: PruneOptions, storage: Storage) -> tuple[Targets, dict[str, nn.Linear]]:
    """Sort a model's linears but for experts' into those to be treated and the rest.

    Returns:
        The linears, and those that would be treated if no option named any to leave alone.
    """
    model = source.meta.model
    find = partial(
        find_targets,
        model,
        lm_head=options.lm_head,
        also_ignore=left_alone(source.checkpoint.config, source.linears) if storage.source else (),
        part=options.part,
        without=source.inside_experts,
    )
    entries = _of_linears(source, options.ignore)
    keep = {**source.meta.why_stored_otherwise(), **source.routers}
    keep |= float_heads(model) if storage.rounds and options.lm_head else {}
    found = find(entries, keep=keep).linears  # first: it refuses wrong entries before the model runs
    keep |= read_without_calling(model, find(keep=keep).linears, source.run)  # once, for any ignore list
    mixers = linears_of_float_mixers(model) if storage.rounds else {}
    if mixers and found.keys() <= keep.keys() | mixers.keys():
        raise InputError(
            f"no linear of {type(model).__name__} can have 8 bits",
            got=f"nothing left to treat but {len(mixers)} linears of first Mamba mixers, which vLLM holds in floats",
            remedy="prune it with --dtype bf16, fp16 or fp32: the zeros are kept, and vLLM serves it dense",
        )
    keep |= mixers
    targets = find(entries, keep=keep)
    head = treated_head(model, targets.linears)
    if options.lm_head and head is None:
        output = output_embedding(model)
        why = (targets.dense.get(name) for name, module in model.named_modules() if module is output)
        got = f"--lm-head, and the output embedding stays dense: {next(why, None) or 'there is none'}"
        raise InputError("options without effect", got=got, remedy="leave out --lm-head")
    marked = () if source.marker is None else source.marker.ignore
    left = unless_named((name for name in targets.linears if name in marked and name != head), options.layers)
    return find([*entries, *left], keep=keep) if left else targets, find(keep=keep).linears


def _of_linears(source: Source, entries: Iterable[str]) -> list[str]:
    """Return an ignore list without the entries that match others alone: experts, or routers, which stay dense."""
    others = [*source.expert_layers, *source.routers]

    def matches(names: Iterable[str], entry: str) -> bool:
        return any(matches_entry(name, entry) for name in names)

    return [entry for entry in entries if matches(source.linears, entry) or not matches(others, entry)]


def unless_named(left: Iterable[str], layers: Iterable[str]) -> list[str]:
    """Return what a pruned source left alone, but for what an entry of ``layers`` asks to treat."""
    return [name for name in left if not any(matches_entry(name, entry) for entry in layers)]
