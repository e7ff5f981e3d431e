"""Find the linears of a checkpoint that are treated: by what its model, a run of that and its files show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from slidesparse.checkpoints.meta_model import MetaModel
from slidesparse.errors import InputError
from slidesparse.models.experts import Experts, linears_inside
from slidesparse.models.float_linears import float_heads, linears_of_float_mixers
from slidesparse.models.parts import Part, output_embedding
from slidesparse.models.targets import Targets, find_targets, matches_entry, treated_head


def find_treated(
    meta: MetaModel,
    experts: Sequence[Experts],
    routers: Mapping[str, str],
    ignore: Iterable[str],
    read: Callable[[Mapping[str, nn.Linear]], Mapping[str, str]],
    *,
    quantise: bool,
    lm_head: bool = False,
    also_ignore: Iterable[str] = (),
    part: Part = "language",
) -> Targets:
    """Sort a model's linears into those to be treated and the rest, as :func:`find_targets`, but for experts'.

    ``read`` returns what :func:`slidesparse.models.weight_reads.read_without_calling` says of linears. It is given all
    that any ignore list could leave, so that one answer holds for each.
    """
    inside = linears_inside(meta.model, experts)
    left = [*(one.layer(leaf) for one in experts for leaf in one.weights), *routers]
    linears = {name for name, module in meta.model.named_modules() if isinstance(module, nn.Linear)} - inside.keys()
    entries = _of_linears(ignore, linears, left)

    def find(keep: dict[str, str], entries: Iterable[str] = entries) -> Targets:
        return find_targets(meta.model, entries, lm_head, also_ignore, part=part, keep=keep, without=inside)

    keep = {**meta.why_stored_otherwise(), **routers}
    keep |= float_heads(meta.model) if quantise and lm_head else {}
    found = find(keep).linears  # first: it refuses wrong entries before the model runs
    keep |= read(find(keep, ()).linears)
    mixers = linears_of_float_mixers(meta.model) if quantise else {}
    if mixers and found.keys() <= keep.keys() | mixers.keys():
        raise InputError(
            f"no linear of {type(meta.model).__name__} can have 8 bits",
            got=f"nothing left to treat but {len(mixers)} linears of first Mamba mixers, which vLLM holds in floats",
            remedy="prune it with --dtype bf16, fp16 or fp32: the zeros are kept, and vLLM serves it dense",
        )
    targets = find(keep | mixers)
    if lm_head and treated_head(meta.model, targets.linears) is None:
        head = output_embedding(meta.model)
        why = (targets.dense.get(name) for name, module in meta.model.named_modules() if module is head)
        got = f"--lm-head, and the output embedding stays dense: {next(why, None) or 'there is none'}"
        raise InputError("options without effect", got=got, remedy="leave out --lm-head")
    return targets


def _of_linears(entries: Iterable[str], linears: set[str], others: Sequence[str]) -> list[str]:
    """Return an ignore list without the entries that match others alone: experts, or routers, which stay dense."""

    def matches(names: Iterable[str], entry: str) -> bool:
        return any(matches_entry(name, entry) for name in names)

    return [entry for entry in entries if matches(linears, entry) or not matches(others, entry)]


def unless_named(left: Iterable[str], layers: Iterable[str]) -> list[str]:
    """Return what a pruned source left alone, but for what an entry of ``layers`` asks to treat."""
    return [name for name in left if not any(matches_entry(name, entry) for entry in layers)]
