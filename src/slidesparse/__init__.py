"""slidesparse: run (2N-2):2N sparse language models on 2:4 Sparse Tensor Cores, exactly.

>>> import slidesparse as ss
>>> str(ss.Pattern.parse("6:8").ideal_speedup)
'4/3'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slidesparse.base.version import __version__ as __version__
from slidesparse.errors import CheckpointError, InputError, PatternViolation, SlideSparseError, UnsupportedError

if TYPE_CHECKING:
    from slidesparse.checkpoints.load import load
    from slidesparse.layer.linear import SlideLinear
    from slidesparse.models.held_zeros import HeldZeros
    from slidesparse.models.sparsify import sparsify_
    from slidesparse.offline.evaluate import evaluate
    from slidesparse.offline.prune_function import prune
    from slidesparse.ops.matmul import matmul
    from slidesparse.pruning import prune_mask
    from slidesparse.recovery.compress import compress
    from slidesparse.recovery.recover_function import recover
    from slidesparse.weights.packed import PackedWeight
    from slidesparse.weights.packing import pack
    from slidesparse.weights.pattern import Pattern
    from slidesparse.weights.slide import lift
    from slidesparse.weights.support import tightest_pattern

__all__ = [
    "CheckpointError",
    "HeldZeros",
    "InputError",
    "PackedWeight",
    "Pattern",
    "PatternViolation",
    "SlideLinear",
    "SlideSparseError",
    "UnsupportedError",
    "compress",
    "evaluate",
    "lift",
    "load",
    "matmul",
    "pack",
    "prune",
    "prune_mask",
    "recover",
    "sparsify_",
    "tightest_pattern",
]

_MODULES = {
    "HeldZeros": "models.held_zeros",
    "PackedWeight": "weights.packed",
    "Pattern": "weights.pattern",
    "SlideLinear": "layer.linear",
    "compress": "recovery.compress",
    "evaluate": "offline.evaluate",
    "lift": "weights.slide",
    "load": "checkpoints.load",
    "matmul": "ops.matmul",
    "pack": "weights.packing",
    "prune": "offline.prune_function",
    "prune_mask": "pruning",
    "recover": "recovery.recover_function",
    "sparsify_": "models.sparsify",
    "tightest_pattern": "weights.support",
}
"""Public name -> the module that defines it."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes seconds to import, and ``slidesparse --help`` none."""
    if name not in _MODULES:
        raise AttributeError(f"module 'slidesparse' has no attribute {name!r}")
    value = getattr(import_module(f"slidesparse.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
