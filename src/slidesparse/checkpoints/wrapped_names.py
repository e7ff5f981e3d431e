"""Names of wrappers in the names of tensors, left by torch.compile, FSDP, DDP and PEFT."""

from __future__ import annotations

import re
from collections.abc import Sequence

INSIDE = r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_fpw_module|_checkpoint_wrapped_module|base_layer)[.]"
"""Wrappers around any module."""

AROUND = r"^(?:(?:module|base_model[.]model|pretrained_model)[.])+"
"""Wrappers around a whole model. A part may have such a name itself, so all tensors must begin with one."""

ADAPTER = re.compile(r"\.(lora_\w+|ia3_l|hada_[wt]\d\w*|lokr_[wt]\d\w*|b?oft_\w+|vera_lambda_\w|modules_to_save)(\.|$)")
"""Tensors of PEFT's adapters; ``lora_magnitude_vector`` is DoRA's."""


def unwrapped(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the expressions that match wrappers in names, and the names without wrappers: name -> bare name.

    >>> unwrapped(["module.a", "head"]), unwrapped(["module.q._orig_mod.a"])[1]
    (([], {'module.a': 'module.a', 'head': 'head'}), {'module.q._orig_mod.a': 'q.a'})
    """
    bare = {name: re.sub(INSIDE, "", name) for name in names}
    found = [INSIDE] if any(map(re.compile(INSIDE).search, names)) else []
    if bare and all(re.match(AROUND, name) for name in bare.values()):
        return [*found, AROUND], {name: re.sub(AROUND, "", one) for name, one in bare.items()}
    return found, bare
