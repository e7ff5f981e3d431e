"""The Hopper kernel's operands, decoded by an emulator of the hardware's view: no GPU needed."""

from __future__ import annotations

import hopper_emulator as emulator
import numpy as np
import pytest
import torch

from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.hopper.weights import SLABS, step_shapes
from slidesparse.layout import slab_view
from slidesparse.ops import quantize_lift
from slidesparse.packed import PackedWeight, pack_segments
from slidesparse.pattern import Pattern
from slidesparse.prune import prune_mask
from slidesparse.quant import quantize_rows
from slidesparse.support import as_bits, following_groups

PATTERNS = ("2:4", "4:6", "6:8", "8:10", "14:16", "4:6@50%", "2:4@30%", "dense")
DTYPES = (torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16)


def _packed(pattern: str, dtype: torch.dtype, out: int, columns: int, k_offset: int = 0) -> PackedWeight:
    weight = torch.randn(out, k_offset + columns) * 30
    weight = (weight * prune_mask(weight, pattern)).to(dtype)[:, k_offset:].contiguous()
    groups = following_groups(weight, Pattern.parse(pattern), k_offset) if k_offset else None
    scale = torch.rand(out) if dtype.itemsize == 1 else None
    return pack_segments(weight, pattern, scale=scale, k_offset=k_offset, groups=groups)


def _decoded(packed: PackedWeight) -> np.ndarray:
    dense, sparse = (tensor.numpy() for tensor in Hopper().prepare(packed))
    return emulator.weights(dense, sparse, packed.dtype.itemsize)


def _bits(matrix: torch.Tensor) -> np.ndarray:
    return as_bits(matrix).numpy().view(emulator.TYPES[matrix.element_size()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_hardware_reads_the_weight_by_the_column_map(pattern: str, dtype: torch.dtype) -> None:
    packed = _packed(pattern, dtype, 70, 333)
    decoded, column_map = _decoded(packed), Hopper.layout.column_map(packed).numpy()
    assert decoded.shape == (256, len(column_map))
    assert not decoded[70:].any()
    assert not decoded[:, column_map < 0].any()
    # The lifted columns of an input column share its weights among them: together they are the weight, each once.
    weight, total = _bits(packed.unpack()), np.zeros((70, 333), np.int64)
    for column, source in enumerate(column_map):
        if source >= 0:
            total[:, source] += decoded[:70, column]
    assert np.array_equal(total, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_shapes_of_the_steps_follow_from_the_column_order(pattern: str, dtype: torch.dtype) -> None:
    for out, columns, k_offset in ((70, 333, 0), (256, 1024, 0), (257, 16, 0), (70, 400, 3)):
        packed = _packed(pattern, dtype, out, columns, k_offset % Pattern.parse(pattern).group)
        order = Hopper.layout.order(packed)
        assert order is not None
        operand = Hopper().prepare(packed)
        assert step_shapes(order, dtype.itemsize, out) == (operand.dense.shape, operand.sparse.shape)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_int8_product_of_what_the_hardware_reads(pattern: str) -> None:
    packed = _packed(pattern, torch.int8, 130, 500)
    x = torch.randn(200, 500)
    layout = Hopper.layout
    lifted, _ = quantize_lift(x, layout.column_map(packed), torch.int8, "hopper")
    slabs = slab_view(lifted, SLABS).contiguous().view(torch.uint8).numpy()
    ours = emulator.activations(slabs, 1).view(np.int8)[:200].astype(np.int64)
    product = ours @ _decoded(packed).view(np.int8)[:130].astype(np.int64).T
    exact = quantize_rows(x, torch.int8).values.numpy().astype(np.int64) @ packed.unpack().numpy().astype(np.int64).T
    assert np.array_equal(product, exact)


@pytest.mark.parametrize("k_offset", [2, 5])
@pytest.mark.parametrize("pattern", ["6:8", "4:6@50%"])
def test_a_shard_that_starts_inside_a_group(pattern: str, k_offset: int) -> None:
    whole = _packed(pattern, torch.int8, 40, 480).unpack()
    shard = whole[:, 240 + k_offset :].contiguous()
    size = 8 if pattern == "6:8" else 6
    groups = None if pattern == "6:8" else following_groups(shard, Pattern.parse(pattern), (240 + k_offset) % size)
    packed = pack_segments(shard, pattern, scale=torch.ones(40), k_offset=(240 + k_offset) % size, groups=groups)
    decoded, column_map = _decoded(packed).view(np.int8), Hopper.layout.column_map(packed)
    x = torch.randint(-128, 128, (3, shard.shape[1]))
    lifted = torch.where(column_map < 0, 0, x[:, column_map.clamp(min=0)]).numpy()
    assert np.array_equal(lifted @ decoded[:40].astype(np.int64).T, (x @ shard.long().T).numpy())


def test_the_emulator_notices_a_wrong_index() -> None:
    packed = _packed("6:8", torch.int8, 64, 128)
    dense, sparse = (tensor.numpy() for tensor in Hopper().prepare(packed))
    before = emulator.weights(dense, sparse, 1)
    nibble = sparse[0, 0, 0, 4096] & 15  # window 0 of row 0
    sparse[0, 0, 0, 4096] ^= nibble ^ min(emulator.LEGAL - {int(nibble)})
    assert not np.array_equal(before, emulator.weights(dense, sparse, 1))
