"""Replace the linears of a model in memory by sparse ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from slidesparse.base.arguments import require_kind, shown
from slidesparse.base.log import LOG
from slidesparse.errors import InputError, first_line
from slidesparse.gemm import Problem
from slidesparse.gemm.select import Fallback
from slidesparse.layer.linear import BIAS, SlideLinear
from slidesparse.layer.settle import Chooser
from slidesparse.models.description import describe_in_config, models_inside
from slidesparse.models.experts import describe_experts, find_experts, find_routers
from slidesparse.models.float_linears import HEAD_IN_FLOATS, IN_FLOATS, float_heads, linears_of_float_mixers
from slidesparse.models.hooks import move_hooks
from slidesparse.models.match_layer import Matching
from slidesparse.models.parts import Part, language_model, output_embedding
from slidesparse.models.prune_in_memory import check_windows_of_tokens, prune_in_memory
from slidesparse.models.targets import (
    ADAPTER,
    COMPRESSED,
    OFFLOADED,
    OUTPUT,
    OWN_FORWARD,
    describe_dense,
    find_targets,
    input_sets,
    matches_entry,
)
from slidesparse.models.weight_reads import read_without_calling, without_weights
from slidesparse.pruning import Linears, Pruner, get_pruner
from slidesparse.pruning.round_outputs import rounder_after
from slidesparse.weights.packing import pack_weight
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import (
    FLOATS,
    QUANTISED,
    Rounding,
    check_rounding,
    dtype_name,
    parse_dtype,
    rounded_bits,
    rounding_of,
)
from slidesparse.weights.support import check_pattern, check_weight, checked_bias

OUTSIDE = "outside of the transformers model, whose checkpoint alone has scales"
"""Reason for linears that a sentence encoder has after its transformers model: in 8 bits it could not load them."""


def layer_patterns(
    names: Iterable[str], pattern: Pattern | str, layers: Mapping[str, Pattern | str] | None = None
) -> dict[str, Pattern]:
    """Return each layer's pattern: ``pattern``, or that of the first entry of ``layers`` that matches it.

    An entry that matches no layer is an InputError.
    """
    names = list(names)
    default = Pattern.parse(pattern)
    patterns = dict.fromkeys(names, default)
    if layers is not None:
        require_kind(layers, Mapping, "layers", "a dict from names to patterns")
    exceptions = [(entry, Pattern.parse(text)) for entry, text in ({} if layers is None else layers).items()]
    for entry, exception in reversed(exceptions):
        matches = [name for name in names if matches_entry(name, entry)]
        if not matches:
            raise InputError(
                f"layer entry {entry!r} matches no treated layer",
                needed=f"a name such as {names[0]}, or re: and a regular expression",
            )
        patterns.update(dict.fromkeys(matches, exception))
    return patterns


def sets_to_prune(
    model: nn.Module,
    linears: dict[str, nn.Linear],
    patterns: Mapping[str, Pattern],
    pruner: Pruner,
    run: Callable[[], object] | None,
) -> list[list[str]]:
    """Return the sets of layers that a method must see together; without calibration each is a set of its own.

    Different patterns in a set, or a model that cannot be run, is an InputError.
    """
    if not linears or not pruner.needs_calibration:
        return [[name] for name in linears]
    if run is None:
        raise InputError("cannot tell which linears read the same input", remedy="use --method magnitude")
    sets = input_sets(model, linears, run)
    for names in sets:
        if len({patterns[name] for name in names}) > 1:
            raise _unlike(names, patterns)
    return sets


def require_alike(
    model: nn.Module,
    linears: dict[str, nn.Linear],
    patterns: Mapping[str, Pattern | str],
    run: Callable[[], object] | None,
) -> None:
    """Raise an InputError for different patterns in a module's linears that read one input: q, k and v; gate and up.

    Servers join these into one layer, which has one pattern and one type: a word in place of a pattern means another
    type. A model that cannot be run is left to the server's own check.
    """

    def parent(name: str) -> str:
        return name.rpartition(".")[0]

    if run is None or len({(parent(name), p) for name, p in patterns.items()}) == len({*map(parent, patterns)}):
        return  # one pattern in each module
    try:
        sets = input_sets(model, linears, run)
    except InputError:
        return
    for names in sets:
        for module in dict.fromkeys(map(parent, names)):
            together = [name for name in names if parent(name) == module]
            if len({patterns[name] for name in together}) > 1:
                raise _unlike(together, patterns)


def _unlike(names: Iterable[str], patterns: Mapping[str, Pattern | str]) -> InputError:
    listed = ", ".join(f"{name}: {patterns[name]}" for name in names)
    needed = "one pattern, or all left alone"
    return InputError("linears that read one input have different patterns", got=listed, needed=needed)


def run_once(model: nn.Module) -> Callable[[], object] | None:
    """Return a function that runs a transformers model on dummy inputs, on its device; None for other models.

    A multimodal model runs its language part alone.
    """
    model = language_model(model)
    if not hasattr(model, "dummy_inputs"):
        return None
    device = next(model.parameters()).device

    def run() -> object:
        inputs: dict[str, torch.Tensor] = model.dummy_inputs  # type: ignore[assignment]
        try:
            return model(**{name: torch.zeros_like(value, device=device) for name, value in inputs.items()})
        except Exception as error:
            raise InputError(
                f"cannot run {type(model).__name__} to see which linears read the same input",
                got=first_line(error),
                remedy="use --method magnitude",
            ) from error

    return run


def _stay_dense(model: nn.Module, storage: torch.dtype, lm_head: bool) -> dict[str, str]:
    """Return the linears that transformers models, or readers of their checkpoints, need dense, with the reasons."""
    keep: dict[str, str] = {}
    models = dict(models_inside(model))
    for prefix, one in models.items():
        empty = without_weights(one)  # on the meta device
        linears = {} if empty is None else {name: m for name, m in empty.named_modules() if isinstance(m, nn.Linear)}
        reasons = {} if empty is None else read_without_calling(empty, linears, run_once(empty))
        if storage in QUANTISED:  # vLLM reads the checkpoint too
            reasons |= linears_of_float_mixers(one) | (float_heads(one) if lm_head else {})
        output = None if one is model or lm_head else output_embedding(one)
        if output is not None:
            reasons |= {name: OUTPUT for name, module in one.named_modules() if module is output}
        keep |= {f"{prefix}{name}": why for name, why in reasons.items()}
    if models and storage in QUANTISED and hasattr(model, "save_pretrained"):
        names = (name for name, _ in model.named_modules() if not name.startswith(tuple(models)))
        keep |= dict.fromkeys(names, OUTSIDE)
    return keep


def _pruner(model: nn.Module, method: str | None, calibration: torch.Tensor | None, match_steps: int) -> Pruner | None:
    """Return the method, checked against the calibration; None where nothing is pruned."""
    if isinstance(method, str) and method == "auto":
        method = "magnitude" if calibration is None else "sparsegpt"
    pruner = None if method is None else get_pruner(method)
    if not isinstance(match_steps, int) or match_steps < 0:
        raise InputError("steps of matching", got=shown(match_steps), needed="0 or more")
    needs = pruner is not None and pruner.needs_calibration
    if needs and calibration is None:
        raise InputError(f"{method} needs calibration", needed="calibration=, windows of token numbers")
    if not needs and (calibration is not None or match_steps):
        given = "calibration" if calibration is not None else "match_steps"
        raise InputError(f"{given} without effect", got=f"method={method!r}", remedy="use wanda or sparsegpt")
    if calibration is not None:
        check_windows_of_tokens(calibration, model)
    return pruner


def sparsify_(
    model: nn.Module,
    pattern: Pattern | str,
    dtype: str | torch.dtype = "int8",
    *,
    ignore: Iterable[str] = (),
    layers: Mapping[str, Pattern | str] | None = None,
    lm_head: bool = False,
    part: Part = "language",
    method: str | None = "auto",
    calibration: torch.Tensor | None = None,
    match_steps: int = 0,
    backend: str = "auto",
    fallback: Fallback = "dense",
    rounding: Rounding = "absmax",
) -> nn.Module:
    """Prune, quantise and replace the linears of a model, in place. Experts of a mixture stay as they are.

    Forward hooks of a linear run on the layer in its place. Adapters of PEFT stay as they are. So do, in 8 bits, the
    linears of a transformers model that vLLM keeps in a float type.

    A transformers model, also one inside another module such as a sentence encoder, is described in its config, so that
    its ``save_pretrained`` writes a checkpoint that :func:`slidesparse.load`, vLLM and transformers load. Pass the
    whole model that is saved, and leave parts alone by ``ignore`` and ``part``: a part has no access to the config.

    Args:
        model: Any module; transformers models know their output embedding, which stays dense.
        pattern: The common pattern.
        dtype: ``int8`` or ``fp8`` to quantise; ``bf16``, ``fp16`` or ``fp32`` to store as that.
        ignore: Layers to leave alone: see :func:`slidesparse.models.targets.find_targets`.
        layers: Exceptions: see :func:`layer_patterns`.
        lm_head: Treat the output embedding too, unless it is tied to the input embedding.
        part: The part of a multimodal model to treat: ``language``, ``vision`` or ``all``.
        method: Pruning method, or None when the weights satisfy their patterns already. ``auto``: SparseGPT with
            calibration, and magnitude without, which costs a language model many times as much.
        calibration: Token numbers for the methods that need them, int64 [windows, length]: 128 windows of 2048 tokens
            of text like the model's use are usual. The model is a causal language model of transformers. Outliers of
            activations are not folded into weights first, as ``slidesparse prune`` does for INT8 with a text.
        match_steps: Training steps of each pruned layer towards the dense one's outputs; 0: none.
        backend: ``auto`` or a backend's name, for every sparse layer.
        fallback: Backend of ``auto`` for layers that no accelerated backend can run.
        rounding: Rounding of ``int8``: ``6bit`` to six bits, which take 0.8 of the memory on a Hopper GPU. Exceptions
            at ``dense`` keep eight.

    Returns:
        The model.

    Raises:
        InputError: A weight, an option or a name cannot be used. The model is then unchanged.
        PatternViolation: A weight violates its pattern and ``method`` is None.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        >>> str(sparsify_(model, "6:8")[0].pattern)
        '6:8'
    """
    require_kind(model, nn.Module, "model", "a torch.nn.Module")
    storage = parse_dtype(dtype)
    check_rounding(rounding, storage)
    pruner = _pruner(model, method, calibration, match_steps)
    chooser = Chooser(backend, fallback)
    experts = find_experts(model)
    keep = {**_stay_dense(model, storage, lm_head), **find_routers(model, experts)}
    targets = find_targets(model, ignore, lm_head, part=part, keep=keep)
    patterns, common = layer_patterns(targets.linears, pattern, layers), Pattern.parse(pattern)
    roundings = {name: rounding_of(rounding, one, common) for name, one in patterns.items()}
    for name, linear in targets.linears.items():  # all checks come before the first replacement
        weight = linear.weight.detach()
        check_weight(weight, name)
        if storage in FLOATS and storage != weight.dtype:
            check_weight(weight.to(storage), f"{name} as {dtype_name(storage)}")
        if linear.bias is not None:
            checked_bias(linear.bias, linear.out_features, BIAS)
        if method is None:
            check_pattern(weight, patterns[name], name=name)
        size = linear.out_features, linear.in_features
        slid, bits = patterns[name] != DENSE, rounded_bits(roundings[name], storage)
        chooser.choose_unmeasured(Problem(patterns[name], storage, *size, weight.device, slid, bits))
    pruned: dict[str, torch.Tensor] = {}
    if calibration is not None and pruner is not None:
        rounder = rounder_after(pruner, storage, rounding)
        six_bits = rounder is not None and common == DENSE and rounding == "6bit"
        changed = {name: one for name, one in targets.linears.items() if patterns[name] != DENSE or six_bits}
        run = run_once(model)
        how: Any = {"matching": Matching(match_steps) if match_steps else None, "rounder": rounder}
        sets = sets_to_prune(model, changed, patterns, pruner, run)
        pruned = prune_in_memory(model, changed, sets, patterns, pruner, calibration, run=run, **how)
    aliases: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        aliases.setdefault(id(module), []).append(name)
    for name, linear in targets.linears.items():
        weight = pruned.pop(name) if name in pruned else linear.weight.detach()
        if calibration is None and pruner is not None and patterns[name] != DENSE:
            weight = pruner.prune(Linears({name: weight}, patterns[name]))[name]
        packed = pack_weight(weight, patterns[name], storage, roundings[name], name=name)
        run_by: Any = {"backend": backend, "fallback": fallback, "choice": chooser.choose(packed)}
        layer = SlideLinear(packed, linear.bias, dense_dtype=linear.weight.dtype, **run_by).train(linear.training)
        move_hooks(linear, layer)
        for alias in aliases[id(linear)]:  # one module may have several names
            model.set_submodule(alias, layer)
    describe_in_config(model)
    reported = (ADAPTER, IN_FLOATS, HEAD_IN_FLOATS, OUTSIDE, OFFLOADED, COMPRESSED, OWN_FORWARD)
    for line in describe_dense({name: why for name, why in targets.dense.items() if why.endswith(reported)}):
        LOG.warning(line)
    for line in describe_experts(experts):
        LOG.warning("experts stay dense in memory; slidesparse prune treats them in a checkpoint; %s", line)
    return model
