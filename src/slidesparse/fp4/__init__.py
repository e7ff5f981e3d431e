"""FP4 as arithmetic: patterns over pairs of E2M1 values, their packing, scales that line up, and an exact product.

The sparse FP4 instructions of Blackwell keep two of four *pairs* (PTX ISA, "Sparse tcgen05.mma.sp with .kind::mxf4 and
.kind::mxf4nvf4": 4:8 pair-wise). A pair is two values of 4 bits, one byte. So :mod:`weights.slide` holds as it is,
with a byte for a weight, and only the scales are new. Nothing here runs on a GPU: ``docs/fp4.md`` says why.
"""

from slidesparse.fp4.pairs import ExactProduct, PackedPairs, Span, lift_scale, pack_pairs, pair_mask, product, span
from slidesparse.fp4.values import MXFP4, NVFP4, Fp4Format, Fp4Tensor, quantize_fp4

__all__ = [
    "MXFP4",
    "NVFP4",
    "ExactProduct",
    "Fp4Format",
    "Fp4Tensor",
    "PackedPairs",
    "Span",
    "lift_scale",
    "pack_pairs",
    "pair_mask",
    "product",
    "quantize_fp4",
    "span",
]
