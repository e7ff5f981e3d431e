"""What the SlideSparse paper's authors measured, for docs/cards.md and docs/fp4.md; nothing here was measured by us.

From ``slidesparse/tools/all_results_table/cuBLASLt_baseline_csv/appendix_*.csv`` of their repository
bcacdwk/vllmbench at 92a8ca4.
"""

from __future__ import annotations

AUTHORS_TOKENS = (64, 1024, 4096, 16384)

GEMMS: dict[str, dict[str, tuple[float, ...]]] = {
    "A100": {"int8": (1.00, 1.27, 1.38, 1.42), "bf16": (1.03, 0.88, 0.90, 0.90)},
    "RTX 4090": {"int8": (1.11, 1.30, 1.09, 1.07), "fp8": (0.80, 1.32, 1.36, 1.37), "bf16": (1.15, 0.96, 0.95, 0.97)},
    "H100": {"int8": (2.10, 1.06, 1.15, 1.06), "fp8": (1.08, 1.08, 1.13, 1.19), "bf16": (0.80, 1.15, 1.11, 1.10)},
    "B200": {"fp8": (1.01, 1.07, 1.09, 1.18), "bf16": (1.08, 1.09, 1.17, 1.20)},
    "RTX 5080": {"int8": (1.07, 1.12, 1.03, 1.02), "fp8": (0.99, 1.18, 1.15, 1.15), "bf16": (1.91, 1.15, 1.15, 1.14)},
    "GB10": {"int8": (1.01, 1.00, 0.93, 0.86), "fp8": (1.27, 0.85, 0.81, 0.83), "bf16": (1.25, 0.43, 0.41, 0.38)},
}
"""Card -> type -> dense time over that of 6:8, at :data:`AUTHORS_TOKENS`: GEMMs of Qwen2.5-7B's four linears by
cuSPARSELt over their own cuBLASLt path. INT8 of a B200 is left out: their dense GEMM runs far below its rate there."""

FP4_GEMMS = {
    "B200": {1024: (1.35, 1.22), 4096: (0.81, 0.65), 8192: (0.81, 0.57), 16384: (0.75, 0.50)},
    "RTX 5080": {1024: (1.01, 0.76)},
    "GB10": {1024: (0.84, 0.71), 4096: (0.78, 0.55), 8192: (0.73, 0.50)},
}
"""Card -> M = N = K -> 2:4 and 6:8 over dense FP4."""
