"""Types and shapes of tensors in the header of a safetensors file."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from slidesparse.errors import CheckpointError

DIGESTS = "slidesparse_digests"
"""Key of a header's ``__metadata__``: JSON with the digest of every tensor's data."""

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
STORED_NAMES = {
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
}


@dataclass(frozen=True)
class Stored:
    """Type (safetensors' name) and shape of a tensor on disk."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the data."""
        if self.dtype not in ITEM_BYTES:
            raise CheckpointError("type of a stored tensor", got=self.dtype, needed=f"one of {', '.join(ITEM_BYTES)}")
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]
