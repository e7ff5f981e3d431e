"""Names that a wrapper around a model puts into the names of its tensors, and tensors of an adapter among them.

torch.compile, FSDP, DDP and PEFT wrap modules, and a state that is saved from outside of them has their names in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from slidesparse.errors import CheckpointError

INSIDE = ("_orig_mod", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "base_layer")
"""Names of wrappers around any module."""

AROUND = ("module", "base_model.model", "pretrained_model")
"""Names of wrappers around a whole model. Parts of models may have them too, so all tensors must begin with one."""

ADAPTER = re.compile(r"\.(lora_\w+|ia3_l|hada_[wt]\d\w*|lokr_[wt]\d\w*|b?oft_\w+|vera_lambda_\w|modules_to_save)(\.|$)")
"""Tensors of PEFT's adapters; ``lora_magnitude_vector`` is DoRA's."""


def wrappers(names: Iterable[str]) -> dict[str, str]:
    """Return the wrappers that names show, as regular expressions: what is to be removed -> its name.

    >>> wrappers(["_orig_mod.norm.weight", "_orig_mod.q._fsdp_wrapped_module.weight"])
    {'(?<![^.])_orig_mod[.]': '_orig_mod.', '(?<![^.])_fsdp_wrapped_module[.]': '_fsdp_wrapped_module.'}
    >>> wrappers(["module.norm.weight", "head.weight"])
    {}
    """
    names = list(names)
    found = {f"(?<![^.]){one}[.]": f"{one}." for one in INSIDE if any(f".{one}." in f".{name}" for name in names)}
    bare = [unwrapped(name, found) for name in names]
    for one in AROUND:
        if bare and all(name.startswith(f"{one}.") for name in bare):
            found[f"^{re.escape(one)}[.]"] = f"{one}."
            bare = [name.removeprefix(f"{one}.") for name in bare]
    return found


def unwrapped(name: str, found: Iterable[str]) -> str:
    """Return a name without the wrappers that :func:`wrappers` found."""
    for pattern in found:
        name = re.sub(pattern, "", name)
    return name


def refuse_adapter(folder: object, names: Iterable[str]) -> None:
    """Refuse files or tensors of an adapter beside the weights, which one program adds to them and another does not.

    Raises:
        CheckpointError: Naming the first.
    """
    for name in names:
        raise CheckpointError(
            f"{folder} holds an adapter that is not merged",
            got=name,
            needed="weights without one: PEFT adds it to them where it is installed, and servers do not",
            remedy="merge it with PEFT's merge_and_unload() and save_pretrained(), or remove it",
        )
