"""Name the linears of a checkpoint that its model does not use, so that nobody takes them for pruned ones.

transformers passes over the layers that draft tokens for speculation (``mtp.*`` of Qwen3-Next, the last layer of
DeepSeek-V3), and over the tower of a vision model that is loaded for text alone. Servers load them from the same
checkpoint. A layer that no list names would count as quantised and pruned there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from slidesparse.files.stored import Stored

_OF_EXPERTS = re.compile(r"(.*\.experts)\.\d+\.")


def unused_linears(unused: Iterable[str], stored: Callable[[str], Stored]) -> list[str]:
    """Return the linears among weights that fill nothing; an embedding, which looks like one, does no harm here.

    Args:
        unused: Names of tensors.
        stored: Returns type and shape of a tensor.
    """
    weights = (name for name in unused if name.endswith(".weight") and len(stored(name).shape) == 2)
    return [name.removesuffix(".weight") for name in weights]


def without_experts(linears: Iterable[str]) -> list[str]:
    """Return the linears that are no expert's; a marker names experts where they were treated.

    >>> without_experts(["mtp.fc", "mtp.layers.0.mlp.experts.7.up_proj"])
    ['mtp.fc']
    """
    return [name for name in linears if _OF_EXPERTS.match(name) is None]


def quantisation_entries(linears: Iterable[str]) -> list[str]:
    r"""Return entries of a quantisation's ignore list; all experts of a layer share one.

    >>> print(*quantisation_entries(["mtp.fc", "mtp.0.experts.0.up_proj", "mtp.0.experts.1.up_proj"]))
    mtp.fc re:mtp\.0\.experts\..*
    """
    found = ((name, _OF_EXPERTS.match(name)) for name in linears)
    return [*dict.fromkeys(name if one is None else rf"re:{re.escape(one[1])}\..*" for name, one in found)]
