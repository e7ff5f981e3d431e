"""Describe a model in memory in its config, so that transformers saves it as a checkpoint that loads everywhere.

transformers writes a model's config next to its weights, and a :class:`~slidesparse.layer.linear.SlideLinear` gives
its weight as checkpoints have it. The two keys that describe the weights are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

from torch import nn

from slidesparse.errors import UnsupportedError
from slidesparse.layer.linear import SlideLinear
from slidesparse.models.config_keys import MARKER_KEY, QUANTIZATION_KEY, marker_config, quantization_config
from slidesparse.models.experts import find_experts, find_routers, ignore_entries
from slidesparse.models.targets import adapter_parts, treated_head
from slidesparse.weights.quant import QUANTISED, dtype_name


def models_inside(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the outermost transformers models, each with the prefix of its modules' names in ``model``.

    The model is one itself, or wraps one: ``torch.compile``, PEFT, a sentence encoder, a user's own.
    """
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        # Looked up in the class, since wrappers forward attributes of the wrapped model.
        saved = all(hasattr(type(module), leaf) for leaf in ("save_pretrained", "dummy_inputs"))
        if saved and not name.startswith(inside):
            prefix = f"{name}." if name else ""
            inside = (*inside, prefix)
            yield prefix, module


def describe_in_config(model: nn.Module) -> None:
    """Write the sparse and quantised linears of each transformers model inside into its config.

    A model whose layers have several types cannot be described: its ``save_pretrained`` refuses.
    """
    for _, one in models_inside(model):
        _describe(one)


def _describe(model: Any) -> None:
    config = model.config
    # Adapters are saved separately, so a checkpoint has the names without them.
    adapters = adapter_parts(model)
    modules = {name.replace(".base_layer", ""): m for name, m in model.named_modules() if not name.startswith(adapters)}
    layers = {name: module for name, module in modules.items() if isinstance(module, SlideLinear)}
    if not layers:
        return
    experts = find_experts(model)
    linears = (name for name, module in modules.items() if isinstance(module, nn.Linear))
    ignore = [*dict.fromkeys([*linears, *find_routers(model, experts)])]
    dtypes = {layer.weight_dtype for layer in layers.values()}
    if len(dtypes) > 1:
        model.save_pretrained = partial(_refuse_to_save, sorted(map(dtype_name, dtypes)))
        return
    ((common, _),) = Counter(layer.pattern for layer in layers.values()).most_common(1)
    exceptions = {name: layer.pattern for name, layer in layers.items() if layer.pattern != common}
    setattr(config, MARKER_KEY, marker_config(common, ignore, exceptions))
    (dtype,) = dtypes
    if dtype in QUANTISED:
        entries = ignore_entries([one.name for one in experts], every=True)
        head = treated_head(model, layers)
        setattr(config, QUANTIZATION_KEY, quantization_config(dtype, [*ignore, *entries], head))
    entry = getattr(config, QUANTIZATION_KEY, None)
    if dtype not in QUANTISED and isinstance(entry, dict) and entry.get("quant_method") == "compressed-tensors":
        # left from a model that was in 8 bits before
        delattr(config, QUANTIZATION_KEY)


def _refuse_to_save(dtypes: list[str], *_: Any, **__: Any) -> NoReturn:
    """Stand in for ``save_pretrained`` of a model that one checkpoint cannot describe."""
    raise UnsupportedError(
        "a checkpoint has one type of sparse weights",
        got=f"layers in {' and '.join(dtypes)}",
        needed="one call of sparsify_ for all layers, or calls with the same dtype",
    )
