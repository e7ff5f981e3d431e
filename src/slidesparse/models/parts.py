"""The parts of a multimodal model: language model, vision and audio towers, projectors.

transformers gives every part a config of its own class. So a layer belongs to the part whose config the nearest module
around it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import nn

from slidesparse.errors import InputError

Part = Literal["language", "vision", "all"]

CHOICES = ("language", "vision", "all")

WORDS = {
    "language": ("text", "language", "llm"),
    "vision": ("vision", "visual", "image", "vit", "video"),
    "audio": ("audio", "speech", "sound"),
}
"""Part -> words in the name of its config: ``text_config``, ``vision_config``."""


def text_config(config: Any) -> Any:
    """Return the config of a model's language part; for other models the config itself."""
    named = getattr(config, "get_text_config", None)
    try:
        return config if named is None else named()
    except ValueError:  # several of them
        return config


def parts_of(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the part of each module: ``language``, ``vision``, ``audio`` or ``joint``.

    A model without both a language part and another one has none.
    """
    config = getattr(model, "config", None)
    kinds: dict[type, str] = {}
    _classify(config, kinds)
    if "language" not in kinds.values() or set(kinds.values()) <= {"language", "joint"}:
        return {}
    parts: dict[str, str] = {}
    _assign("", model, "joint", kinds, parts)
    # The language model's output embedding is often beside it.
    head = set() if (output := output_embedding(model)) is None else set(output.modules())
    parts |= {name: "language" for name, module in model.named_modules() if module in head}
    return {name: parts[name] for name in names}


def output_embedding(model: nn.Module) -> nn.Module | None:
    """Return the output embedding, which computes logits; None in a model without one."""
    output: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return output


def _assign(name: str, module: nn.Module, around: str, kinds: dict[type, str], parts: dict[str, str]) -> None:
    """Note the part of a module and of all modules inside; ``around`` is the part of its parent."""
    part = kinds.get(_config_class(module), around)
    others = {"vision", "audio"}
    if part == "language" and not is_language_model(module):
        # A module that is no model, and holds a vision or audio tower, joins the two.
        part = "joint" if any(kinds.get(_config_class(inner)) in others for inner in module.modules()) else part
    parts[name] = part
    for child, inside in module.named_children():
        _assign(f"{name}.{child}" if name else child, inside, part, kinds, parts)


def _config_class(module: nn.Module) -> type:
    return type(getattr(module, "config", None))


def is_language_model(module: nn.Module) -> bool:
    """Return whether a module is a transformers model that takes token numbers."""
    embeddings = getattr(module, "get_input_embeddings", None)
    try:
        return embeddings is not None and isinstance(embeddings(), nn.Embedding)
    except (AttributeError, NotImplementedError):
        return False


def language_model(model: nn.Module) -> nn.Module:
    """Return the language model inside a multimodal one, which runs on text alone; other models as they are."""
    kinds: dict[type, str] = {}
    _classify(getattr(model, "config", None), kinds)
    if not {"vision", "audio"} & set(kinds.values()):
        return model
    inner = (m for m in model.modules() if kinds.get(_config_class(m)) == "language" and is_language_model(m))
    return next(inner, model)


def _classify(config: Any, kinds: dict[type, str]) -> None:
    """Add the classes of a config's parts, and of the parts of these."""
    inside = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", ())}
    if inside and hasattr(config, "vocab_size") and text_config(config) is config:
        kinds[type(config)] = "language"  # a language model whose config holds those of its other parts
    for name, one in inside.items():
        found = [part for part, words in WORDS.items() if any(word in name for word in words)]
        if one is not None:
            kinds.setdefault(type(one), found[0] if found else "joint")
            _classify(one, kinds)


def outside_part(model: nn.Module, names: Iterable[str], part: Part) -> dict[str, str]:
    """Return the layers outside a part, each with the reason to leave it alone.

    A model without such a part is an InputError.
    """
    if part not in CHOICES:
        raise InputError("part", got=repr(part), needed=" or ".join(CHOICES))
    parts = parts_of(model, names)
    if part == "all" or (part == "language" and not parts):
        return {}
    if part not in parts.values():
        raise InputError(
            f"{type(model).__name__} has no {part} part", got="a model of one kind", remedy="leave --part out"
        )
    option = "vision or all" if part == "language" else "language or all"
    return {
        name: f"in the {own} part; --part {option if own in ('vision', 'language') else 'all'}"
        for name, own in parts.items()
        if own != part
    }
