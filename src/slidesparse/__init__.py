"""slidesparse: run (2N-2):2N sparse language models on 2:4 Sparse Tensor Cores, exactly.

>>> import slidesparse as ss
>>> str(ss.Pattern.parse("6:8").ideal_speedup)
'4/3'
"""

from typing import TYPE_CHECKING, Any

from slidesparse.errors import CheckpointError, InputError, PatternViolation, SlideSparseError, UnsupportedError
from slidesparse.linear import SlideLinear
from slidesparse.models.sparsify import sparsify_
from slidesparse.packed import PackedWeight
from slidesparse.packing import pack
from slidesparse.pattern import Pattern
from slidesparse.prune import prune_mask
from slidesparse.slide import lift
from slidesparse.support import tightest_pattern

if TYPE_CHECKING:
    from slidesparse.files.load import load

__version__ = "0.2.0"

__all__ = [
    "CheckpointError",
    "InputError",
    "PackedWeight",
    "Pattern",
    "PatternViolation",
    "SlideLinear",
    "SlideSparseError",
    "UnsupportedError",
    "lift",
    "load",
    "pack",
    "prune_mask",
    "sparsify_",
    "tightest_pattern",
]


def __getattr__(name: str) -> Any:
    # Reading files needs safetensors and transformers; computing with weights needs torch alone.
    if name == "load":
        from slidesparse.files.load import load

        return load
    raise AttributeError(f"module 'slidesparse' has no attribute {name!r}")
