"""Sizes of models that are measured by their names, without a checkpoint."""

from __future__ import annotations

TYPES = ("int8", "fp8", "bf16", "fp16")
"""Types of weights that are measured, in the order of tables."""

LAYERS = ("qkv", "o", "gate_up", "down")
"""The linears of a decoder layer, fused as servers fuse them."""

MODELS: dict[str, tuple[tuple[int, int], ...]] = {
    "Llama-3.2-1B": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "Llama-3.2-3B": ((5120, 3072), (3072, 3072), (16384, 3072), (3072, 8192)),
    "Llama-3-8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "Qwen2.5-7B": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    "Qwen2.5-14B": ((7168, 5120), (5120, 5120), (27648, 5120), (5120, 13824)),
    "BitNet-2B": ((3840, 2560), (2560, 2560), (13824, 2560), (2560, 6912)),
}
"""(out, in) of each of :data:`LAYERS`."""
