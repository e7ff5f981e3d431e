"""Find the layers of a model to be treated, and those among them that read the same input.

A layer is found by its type and size (``nn.Linear``, large enough, not the output embedding, in the chosen part of a
multimodal model), not by its name; the exceptions are :data:`READ_AS_MATRIX` and :data:`HEADS`, which differ from
other linears only by their names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from slidesparse.base.arguments import list_of_names, require_kind
from slidesparse.base.counted import counted
from slidesparse.errors import InputError
from slidesparse.layer.linear import SlideLinear
from slidesparse.models.hooks import hooked
from slidesparse.models.layer_kinds import alike, kind_of, shared_name
from slidesparse.models.parts import Part, output_embedding, outside_part

MIN_FEATURES = 32
"""Fewest inputs or outputs of a treated linear: nothing is gained on smaller ones (classifiers, routers)."""

READ_AS_MATRIX = "kv_b_proj"
"""The linear of multi-head latent attention (DeepSeek-V2 and after) whose weight servers split and multiply into other
weights after loading, without calling the layer: it must stay dense."""

HEADS = (".classifier.dense", ".head.dense", ".pooler.dense", ".text_model.head")
"""Names of linears in the heads of transformers' encoders (BERT, RoBERTa, ModernBERT, SigLIP). vLLM has plain
``nn.Linear`` for them and reads no scales (model_executor/models/{bert,roberta,modernbert,siglip}.py)."""

HYPER_CONNECTIONS = ("fn", "hc_fn")
"""Matrices of hyper-connections, which mix the streams of a residual (HYV4): parameters, and no linears."""

OWN_FORWARD = "has a forward of its own"
"""End of the reason for a subclass of ``nn.Linear`` that computes more."""

OFFLOADED = "accelerate keeps its weight elsewhere; load the whole model onto one device"
"""Reason for linears that a ``device_map`` left in host memory or on a disk."""

COMPRESSED = "compressed-tensors computes it; give the folder to slidesparse.load, or to slidesparse prune"
"""Reason for linears that transformers loaded from a checkpoint in 8 bits."""

IGNORED = "on the ignore list"
"""Reason: listed by ``--ignore``, or by the checkpoint."""

OUTPUT = "output embedding"
"""Reason: output embedding, and no ``--lm-head``."""

ADAPTER = "a part of an adapter"
"""Reason for linears that PEFT adds to others: they are small, and trained further."""


@dataclass(frozen=True)
class Targets:
    """The linears of a model.

    Attributes:
        linears: Linears to be treated, by name in the model's order.
        dense: All other linears: name -> reason to leave it alone.
        other: Modules and parameters that multiply and are no ``nn.Linear``: name -> reason.
    """

    linears: dict[str, nn.Linear]
    dense: dict[str, str]
    other: dict[str, str]


def find_targets(
    model: nn.Module,
    ignore: Iterable[str] = (),
    lm_head: bool = False,
    also_ignore: Iterable[str] = (),
    *,
    part: Part = "language",
    keep: Mapping[str, str] | None = None,
) -> Targets:
    """Sort the linears of a model into those to be treated and the rest.

    Args:
        model: May be on the meta device.
        ignore: Names to leave alone: exact module names, or ``re:`` and a regular expression that the start of a name
            must match (the convention of compressed-tensors).
        lm_head: Treat the output embedding too, unless it shares its weight with the input embedding.
        also_ignore: More such names, which a quantised source lists; each may match nothing.
        part: The part of a multimodal model to treat.
        keep: Linear -> reason to keep it dense that the model does not show.

    Raises:
        InputError: An entry of ``ignore`` matches no linear or is malformed, no linear is left to treat, or the model
            has no such part.
    """
    ignore = list_of_names(ignore, "ignore")
    if isinstance(model, nn.Linear):
        raise InputError("the model is one linear layer", remedy="use SlideLinear.from_linear")
    named = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    holders = Counter(id(module.weight) for module in named.values())
    outside = outside_part(model, named, part)
    output = output_embedding(model)
    # With an adapter the output embedding is a module around linears.
    inside_output = set() if output is None else {id(module) for module in output.modules()}
    adapters = adapter_parts(model)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    config = getattr(model, "config", None)
    described = hasattr(config, "model_type")
    ignored = {name for name in named for entry in also_ignore if matches_entry(name, entry)}
    for entry in ignore:
        matches = {name for name in named if matches_entry(name, entry)}
        if not matches:
            raise InputError(
                f"ignore entry {entry!r} matches no linear layer", needed=f"a name such as {next(iter(named), '-')}"
            )
        ignored |= matches

    def why_dense(name: str, module: nn.Linear) -> str | None:
        if name in ignored:
            return IGNORED
        if isinstance(module, NonDynamicallyQuantizableLinear):
            return "nn.MultiheadAttention reads its weight without calling it"
        if read_as_matrix(name):
            return "latent attention reads its weight without calling it"
        if described and f".{name}".endswith(HEADS):
            return "a head of an encoder, which servers keep in floats"
        if name in (keep or {}):
            return (keep or {})[name]
        if name.startswith(adapters):
            return ADAPTER
        if name in outside:
            return outside[name]
        if not computes_as_linear(module):
            return _why_no_linear(module)
        if holders[id(module.weight)] > 1:
            return "shares its weight with another linear, which would need its scales too"
        if id(module.weight) in embeddings:
            return "shares its weight with the input embedding"
        if id(module) in inside_output and not lm_head:
            return OUTPUT
        if min(module.in_features, module.out_features) < MIN_FEATURES:
            return f"smaller than {MIN_FEATURES} features"
        return None

    reasons = {name: why_dense(name, module) for name, module in named.items()}
    linears = {name: module for name, module in named.items() if reasons[name] is None}
    targets = Targets(linears, {name: why for name, why in reasons.items() if why is not None}, no_linears(model))
    if not linears:
        sparse = sum(isinstance(module, SlideLinear) for module in model.modules())
        got = [f"{counted(sparse, 'SlideLinear')}, sparse already"] if sparse else []
        got += [line.removeprefix("left dense: ") for line in describe_dense({**targets.dense, **targets.other})[:3]]
        raise InputError(
            "the model has no linear layer to treat",
            got="; ".join(got) or "no linear layer",
            needed="at least one nn.Linear, in a mixture of experts too",
        )
    return targets


def treated_head(model: nn.Module, treated: Mapping[str, nn.Module]) -> str | None:
    """Return the name of the output embedding if it is treated; else None."""
    output = output_embedding(model)
    return next((name for name, module in treated.items() if module is output), None)


def computes_as_linear(module: nn.Linear) -> bool:
    """Return whether a linear computes ``x W^T + b`` and nothing else; subclasses may have a forward of their own.

    It is tried on a small ``nn.Linear``: a forward that needs other attributes computes more.

    >>> computes_as_linear(nn.Linear(4, 3))
    True
    """
    if "forward" in vars(module):  # replaced on this one
        return False
    forward = type(module).forward
    if forward is nn.Linear.forward:
        return True
    plain = nn.Linear(3, 2, bias=module.bias is not None, device="cpu", dtype=torch.float64)
    x = torch.linspace(-2, 3, 12, dtype=torch.float64).reshape(2, 2, 3)
    try:
        with torch.no_grad():
            return bool(torch.allclose(forward(plain, x), plain(x), rtol=1e-9, atol=1e-12))
    except Exception:  # a plain linear raises nothing
        return False


def _why_no_linear(module: nn.Linear) -> str:
    """Return the reason to leave a linear with another forward alone."""
    if hasattr(module, "_hf_hook"):
        return OFFLOADED
    if hasattr(module, "quantization_scheme"):
        return COMPRESSED
    return f"{type(module).__name__} {OWN_FORWARD}"


def no_linears(model: nn.Module) -> dict[str, str]:
    """Return the modules and parameters that multiply like a linear, each with the reason to leave it alone.

    These are transformers' ``Conv1D`` (GPT-2), which stores a weight [in, out], and matrices of hyper-connections.
    """
    convolutions = {
        name: "Conv1D, whose weight is stored [in, out]: compressed-tensors quantises nn.Linear alone"
        for name, module in model.named_modules()
        if type(module).__name__ == "Conv1D" and not isinstance(module, nn.Conv1d)
    }
    return convolutions | {
        name: "a hyper-connection, which multiplies by a parameter and is no nn.Linear"
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[2] in HYPER_CONNECTIONS and parameter.dim() == 2
    }


def adapter_parts(model: nn.Module) -> tuple[str, ...]:
    """Return the name prefixes of linears in PEFT's adapters, as listed by its layers."""
    named = ((name, getattr(module, "adapter_layer_names", ())) for name, module in model.named_modules())
    return tuple(f"{name}.{leaf}.".removeprefix(".") for name, leaves in named for leaf in leaves)


def read_as_matrix(name: str) -> bool:
    """Return whether a layer of this name is :data:`READ_AS_MATRIX`."""
    return name.rpartition(".")[2] == READ_AS_MATRIX


def describe_dense(dense: Mapping[str, str]) -> list[str]:
    """Return a line for each kind of linear that stays dense, with its reason; those that differ by number share it."""
    kinds = alike(dense, lambda name: (kind_of(name), dense[name]))
    return [f"left dense: {shared_name(names)} ({dense[names[0]]})" for names in kinds]


def matches_entry(name: str, entry: str) -> bool:
    """Return whether a module name matches an ignore or layer entry: exact, or ``re:`` and a regular expression.

    Raises:
        InputError: The entry is no text, or no regular expression.
    """
    require_kind(entry, str, "entry of a list of layers", "a name, or re: and a regular expression")
    if not entry.startswith("re:"):
        return name == entry
    try:
        return re.match(entry[3:], name) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise InputError(f"entry {entry[:80]!r} is no regular expression", got=error) from error


def input_sets(model: nn.Module, linears: dict[str, nn.Linear], run: Callable[[], object]) -> list[list[str]]:
    """Partition linears by the input tensor that they read.

    Returns:
        Lists of names in the model's order: q, k and v of a layer in one list, gate and up in one, most others alone.
    """
    seen: dict[str, tuple[object, ...]] = {}
    alive: list[torch.UntypedStorage] = []  # an input that is freed could lend its identity to another

    def remember(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0]
            storage = x.untyped_storage()  # the same object for all views, as long as it is referenced
            alive.append(storage)
            seen.setdefault(name, (id(storage), x.storage_offset(), tuple(x.shape)))

        return hook

    with hooked(module.register_forward_pre_hook(remember(name)) for name, module in linears.items()), torch.no_grad():
        run()
    sets: dict[object, list[str]] = {}
    for name in linears:
        sets.setdefault(seen.get(name, name), []).append(name)
    return list(sets.values())
