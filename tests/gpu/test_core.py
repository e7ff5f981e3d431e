"""The core on a GPU: the same bits as on a CPU, under torch.compile and CUDA graphs too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import by_magnitude, make_checkpoint, tokens
from gpu_products import packed_weight
from torch import nn

import slidesparse
from slidesparse import ops
from slidesparse.gemm import Problem, get_backend
from slidesparse.layer.linear import SlideLinear
from slidesparse.lifting.layout import ColumnOrder
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.pruning import prune_mask
from slidesparse.weights.packed import pack_by
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import quantize_rows
from slidesparse.weights.slide import gather
from slidesparse.weights.support import as_bits

pytestmark = pytest.mark.gpu

PATTERNS = ("2:4", "4:6", "6:8", "30:32")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
def test_quantised_rows_have_the_bits_of_the_cpu(dtype: torch.dtype, kind: torch.dtype) -> None:
    x = torch.randn(511, 777, dtype=kind)
    x[3], x[4] = 0, x[4] * 1e-3
    x[5, 1:] = x[5, 0] / 2  # ties of INT8
    here, there = quantize_rows(x, dtype), quantize_rows(x.cuda(), dtype)
    assert torch.equal(here.scale, there.scale.cpu())
    assert torch.equal(as_bits(here.values), as_bits(there.values.cpu()))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_and_packed_weights_have_the_bits_of_the_cpu(pattern: str) -> None:
    weight = torch.randn(65, 333, dtype=torch.bfloat16)
    mask = prune_mask(weight, pattern)
    assert torch.equal(mask, prune_mask(weight.cuda(), pattern).cpu())
    here, there = pack_by(weight * mask, pattern), pack_by((weight * mask).cuda(), pattern)
    assert torch.equal(as_bits(here.values), as_bits(there.values.cpu()))
    assert torch.equal(here.code, there.code.cpu())
    assert torch.equal(there.unpack().cpu(), weight * mask)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("m", [0, 1, 199])
def test_int8_layer_has_the_bits_of_the_cpu(pattern: str, m: int) -> None:
    linear = nn.Linear(333, 96).to(torch.bfloat16)
    x = torch.randn(m, 333, dtype=torch.bfloat16)
    here = SlideLinear.from_linear(linear, pattern, "int8", method="magnitude", backend="reference")
    there = SlideLinear.from_linear(linear.cuda(), pattern, "int8", method="magnitude", backend="reference")
    assert torch.equal(here(x), there(x.cuda()).cpu())


def test_checkpoint_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # loading measures layers: not into the user's table
    make_checkpoint(tmp_path / "m")
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("4:6", "int8"))
    here = slidesparse.load(tmp_path / "s")(tokens()).logits.float()
    model = slidesparse.load(tmp_path / "s", device="cuda")
    assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
    there = model(tokens().cuda()).logits.float().cpu()
    torch.testing.assert_close(there, here, rtol=0.05, atol=0.05)  # attention and norms differ in bf16


@pytest.mark.parametrize("pattern", [f"{2 * n - 2}:{2 * n}" for n in range(2, 17)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_every_pattern_on_the_gpu(pattern: str, dtype: torch.dtype) -> None:
    """The fused kernel gives the bits of the torch definition, for each code that the compiler makes of it.

    ptxas once miscompiled FP8 at 8:10 alone, and only where K is a multiple of 10.
    """
    for columns in (320, 2560, 3584, 5120):
        weight = torch.randn(4, columns)
        packed = pack_by(weight * prune_mask(weight, pattern), pattern).to("cuda")
        order, column_map = ColumnOrder.of(packed, 32), packed.column_map(32)
        for m in (1, 64, 300):
            x = torch.randn(m, columns, dtype=torch.bfloat16, device="cuda")
            values, scale = ops.quantize_lift(x, column_map, dtype, order=order.numbers)
            expected = quantize_rows(x, dtype)
            assert torch.equal(scale, expected.scale)
            assert torch.equal(as_bits(values), as_bits(gather(expected.values, column_map)))


@pytest.mark.parametrize(("backend", "pattern"), [("hopper", "6:8"), ("cusparselt", "2:4")])
def test_more_than_2_31_outputs(backend: str, pattern: str) -> None:
    m, out, columns = 65536, 37888, 64
    problem = Problem(Pattern.parse(pattern), torch.int8, out, columns, torch.device("cuda"))
    if (why := get_backend(backend).why_not(problem)) is not None:
        pytest.skip(why)
    needed = m * out * 6 + (4 << 30)  # sums of 32 bits, of cuSPARSELt, and the result
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GiB of GPU memory")
    packed = packed_weight(torch.int8, pattern, out, columns)
    layer, reference = (SlideLinear(packed, backend=name, fallback="none") for name in (backend, "reference"))
    x = torch.randn(m, columns, dtype=torch.bfloat16, device="cuda")
    y = layer(x)
    for start in (0, 28340, 56680, m - 64):  # 2^31 / out = 56680 is where 32 bits end
        assert torch.equal(y[start : start + 64], reference(x[start : start + 64]))
