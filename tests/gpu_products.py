"""Weights and activations on a GPU, and what every backend must keep to: one result, whatever runs beside or before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.steps import SLABS
from slidesparse.layer.linear import SlideLinear
from slidesparse.pruning import prune_mask
from slidesparse.weights.packed import PackedWeight, pack_by
from slidesparse.weights.slide import gather

INT8 = torch.int8

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def skip_without_fp8(dtype: torch.dtype | str) -> None:
    if dtype in (torch.float8_e4m3fn, "fp8") and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")


def packed_weight(
    dtype: torch.dtype,
    pattern: str,
    out: int,
    columns: int,
    *,
    scaled: bool | None = None,
    bits: int = 8,
    k_offset: int = 0,
) -> PackedWeight:
    """A random weight, with scales where its type is quantised unless told otherwise; INT8 of 8 bits or 6."""
    size = out, k_offset + columns
    if dtype == INT8:
        whole = torch.randint(-128, 128, size, dtype=INT8, device="cuda") & (-4 if bits == 6 else -1)
    else:
        whole = torch.randn(size, device="cuda")
    weight = (whole * prune_mask(whole, pattern)).to(dtype)[:, k_offset:].contiguous()
    scaled = dtype.itemsize == 1 if scaled is None else scaled
    scale = torch.rand(out, device="cuda") * 1e-3 if scaled else None
    return pack_by(weight, pattern, scale=scale, k_offset=k_offset)


def tokens_of(dtype: torch.dtype, m: int, columns: int) -> torch.Tensor:
    if dtype == INT8:
        return torch.randint(-128, 128, (m, columns), dtype=INT8, device="cuda")
    return torch.randn(m, columns, device="cuda").to(dtype)


def in_slabs(x: torch.Tensor, packed: PackedWeight, backend: type[Hopper] = Hopper) -> torch.Tensor:
    """Lifted; what stands past the tokens is poison, which must not reach a result."""
    rows, tokens = gather(x, backend.layout.column_map(packed)), x.shape[0]
    padded = rows.new_empty(SLABS.padded(tokens), rows.shape[1])
    padded.view(torch.uint8).fill_(0x7F)  # FP8: NaN
    padded[:tokens] = rows
    return SLABS.arrange(padded).view(padded.shape)[:tokens]


def assert_same_every_time(run: Callable[[], torch.Tensor], times: int) -> None:
    """Bit for bit."""
    expected = run()
    assert torch.isfinite(expected).all()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(times):
        different += (run().view(torch.uint8) != expected.view(torch.uint8)).any()
    assert int(different) == 0


def assert_compiled_and_captured(
    layer: SlideLinear, x: torch.Tensor, poison_mb: int = 0, dynamic: bool | None = True
) -> None:
    """A compiled layer and a graph of it give the bits of an eager one, on poison and for other activations.

    ``poison_mb`` of other memory are taken before a replay: what a graph took for itself must not be handed to others.
    """
    eager = layer(x)
    torch._dynamo.reset()  # it compiles one function for so many layers, then for no more
    assert torch.equal(torch.compile(layer, fullgraph=True, dynamic=dynamic)(x), eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    for other in (x, torch.randn_like(x)):
        x.copy_(other)
        expected = layer(x)
        captured.fill_(float("nan"))
        poison = [torch.full((1 << 20,), 0xA5, dtype=torch.uint8, device="cuda") for _ in range(poison_mb)]
        graph.replay()
        assert torch.equal(captured, expected)
        del poison


def assert_same_on_two_streams(layers: Sequence[SlideLinear], columns: int) -> None:
    """Layers on a stream each, beside one another, give what they give alone."""
    streams = [torch.cuda.Stream() for _ in layers]
    inputs = [[torch.randn(m, columns, device="cuda").bfloat16() for m in (1000, 17) * 20] for _ in layers]
    expected = [[layer(x) for x in xs] for layer, xs in zip(layers, inputs, strict=True)]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[] for _ in layers]
    for i in range(40):
        for stream, layer, xs, ys in zip(streams, layers, inputs, found, strict=True):
            with torch.cuda.stream(stream):
                ys.append(layer(xs[i]))
    torch.cuda.synchronize()
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
