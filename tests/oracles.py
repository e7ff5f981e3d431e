"""Independent, slow definitions that the suite compares the package with: numpy and plain Python, no package code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def supports(size: int, most: int) -> np.ndarray:
    """Every 0/1 row of ``size`` positions with at most ``most`` ones: bool [n, size]."""
    rows = (np.arange(2**size)[:, None] >> np.arange(size)) & 1
    return rows[rows.sum(1) <= most].astype(bool)


def calibration_gram(x: torch.Tensor) -> torch.Tensor:
    """The sum of ``x x^T`` over tokens [windows, length, in], the first of a window counted as an eighth of it."""
    tokens, first = x.flatten(0, 1), x[:, 0]
    # In the order of calibration: SparseGPT makes 1e-3 of a weight of the last bits of this sum.
    return (tokens.T @ tokens).addmm_(first.T, first, alpha=max(x.shape[1] // 8, 1) - 1)


def random_int8(support: np.ndarray, seed: int = 0) -> torch.Tensor:
    """Random non-zero int8 values, both extremes included, on a support; zeros elsewhere."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-128, 127, support.shape)
    values[values >= 0] += 1
    return torch.from_numpy((values * support).astype(np.int8))


def sparse_int8(out: int, columns: int, keep: int, group: int, seed: int = 0) -> torch.Tensor:
    """A random int8 weight with exactly ``keep`` non-zeros in every whole group aligned to column 0."""
    rng = np.random.default_rng(seed)
    groups = -(-columns // group)
    order = rng.random((out, groups, group)).argsort(-1)
    return random_int8((order < keep).reshape(out, groups * group)[:, :columns], seed)


def greedy_slide(row: Sequence[int], n: int) -> tuple[list[int], list[bool]]:
    """The paper's offline packer ("Greedy Residual Allocation"): the slid row, and which columns it used."""
    groups = len(row) // (2 * n)
    slid = [0] * (4 * (n - 1) * groups)
    used = [False] * len(row)
    for g in range(groups):
        for window in range(n - 1):
            start, count = 2 * n * g + 2 * window, 0
            for delta in range(4):
                if row[start + delta] != 0 and not used[start + delta] and count < 2:
                    slid[(n - 1) * 4 * g + 4 * window + delta] = row[start + delta]
                    used[start + delta] = True
                    count += 1
    return slid, used


def lift_row(x: Sequence[int], n: int) -> list[int]:
    """The paper's Psi: the four columns of every window, one group after the other."""
    return [
        x[2 * n * g + 2 * window + delta]
        for g in range(len(x) // (2 * n))
        for window in range(n - 1)
        for delta in range(4)
    ]


def vllm_int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``dynamic_scaled_int8_quant`` of vLLM in numpy float32: x [M, K] -> int8 [M, K], scale [M, 1]."""
    x = x.astype(np.float32)
    absmax = np.abs(x).max(1, keepdims=True, initial=np.float32(0))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(absmax == 0, np.float32(0), np.float32(127) / absmax)
        scaled = np.rint(x * inverse)
    # cvt.rni.sat.s8.f32: NaN (0 * inf, in a subnormal row) becomes 0, the rest saturates.
    values = np.clip(np.where(np.isnan(scaled), np.float32(0), scaled), -128, 127).astype(np.int8)
    return values, absmax / np.float32(127)


def e4m3_values() -> np.ndarray:
    """All finite non-negative float8_e4m3fn numbers, by their definition, ascending: float64 [127]."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def vllm_fp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``dynamic_per_token_scaled_fp8_quant`` of vLLM: x [M, K] -> values as float64 [M, K], scale float32 [M, 1]."""
    x = x.astype(np.float32)
    absmax = np.abs(x).max(1, keepdims=True, initial=np.float32(0))
    scale = np.maximum(absmax / np.float32(448), np.float32(1 / (448 * 512)))
    return to_e4m3(x / scale), scale


def sglang_int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """SGLang's ``_per_token_quant_int8`` (kernels/ops/quantization/int8_kernel.py), with divisions that are rounded."""
    x = x.astype(np.float32)
    absmax = np.maximum(np.abs(x).max(1, keepdims=True, initial=np.float32(0)), np.float32(1e-10))
    scaled = (x * (np.float32(127) / absmax)).astype(np.float64)
    return (np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)).astype(np.int8), absmax / np.float32(127)


def sglang_fp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``per_token_quant_fp8`` (kernels/jit/csrc/gemm/per_token_quant_fp8.cuh), for many tokens, divisions rounded."""
    x = x.astype(np.float32)
    scale = np.abs(x).max(1, keepdims=True, initial=np.float32(0)) / np.float32(448)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    return to_e4m3(x * inverse), scale


def to_e4m3(numbers: np.ndarray) -> np.ndarray:
    """Round float32 numbers to float8_e4m3fn, ties to even, saturated: float64."""
    target = np.clip(numbers, np.float32(-448), np.float32(448)).astype(np.float64)
    grid = e4m3_values()
    magnitude = np.abs(target)
    upper = np.clip(np.searchsorted(grid, magnitude), 1, 126)
    below, above = magnitude - grid[upper - 1], grid[upper] - magnitude
    # On a tie the code with an even last bit wins: codes are consecutive, so that is the even index.
    up = (above < below) | ((above == below) & (upper % 2 == 0))
    return np.copysign(np.where(up, grid[upper], grid[upper - 1]), target)


def scaled_product(
    accumulator: np.ndarray, scale_x: np.ndarray, scale_w: np.ndarray, bias: np.ndarray | None
) -> np.ndarray:
    """vLLM's epilogue: accumulator [M, out] int64, scale_x [M, 1], scale_w [out] -> float32 [M, out].

    Token scale and bias are one fused multiply-add: in long double, whose sum is as good as exact before it is rounded.
    """
    y = scale_w.reshape(1, -1) * accumulator.astype(np.float32)
    if bias is None:
        return scale_x * y
    return (scale_x.astype(np.longdouble) * y + bias.astype(np.float32)).astype(np.float32)
