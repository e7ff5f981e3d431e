"""Lifts with a prologue on a GPU: the numbers of their definitions, in every layout, captured and launched again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from fused_lifts import fused_lift
from triton import knobs

from slidesparse import Pattern, ops, pack
from slidesparse.gemm import select
from slidesparse.gemm.reference import Reference
from slidesparse.lifting.layout import Layout, Slabs
from slidesparse.lifting.prologue import add_rms_norm, rms_norm, silu_mul
from slidesparse.weights.quant import quantize_rows
from slidesparse.weights.slide import gather
from slidesparse.weights.support import as_bits

pytestmark = pytest.mark.gpu

EPS = 1e-6
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]
FUSED = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "silu_mul": silu_mul}
SLABS = Slabs(64, swizzle=True)


@pytest.fixture(autouse=True)
def _backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that want rows past the tokens, and slabs."""
    layouts = {"padded": Layout(multiple=32, rows=lambda tokens: tokens + 5), "tiled": Layout(slabs=SLABS)}
    for name, layout in layouts.items():
        monkeypatch.setitem(select.BACKENDS, name, type(name, (Reference,), {"name": name, "layout": layout}))


def problem(prologue: str, pattern: str, tokens: int, columns: int, backend: str) -> tuple[tuple, tuple, Callable]:
    """Inputs, the rest of the arguments but for the type, and the lift."""
    packed = pack(torch.zeros(1, columns, dtype=torch.int8), pattern).to("cuda")
    layout = select.get_backend(backend).layout
    order = layout.order(packed)
    x, residual = torch.randn(2, tokens, columns, dtype=torch.bfloat16, device="cuda").unbind(0)
    gain = torch.randn(columns, dtype=torch.bfloat16, device="cuda")
    given = {
        "rms_norm": (x, gain, EPS),
        "add_rms_norm": (x, residual, gain, EPS),
        "silu_mul": (torch.cat([x, residual], 1),),
    }[prologue]
    run = partial(fused_lift, prologue)
    return given, (layout.column_map(packed), (backend, order.numbers)), run


def test_a_kernel_compiles_while_somebody_listens_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM does once it serves."""
    heard: list[str] = []
    for hook in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(knobs.runtime, hook, lambda fn, **_: heard.append(fn.name))
    columns = 1234  # of no other test, so that these kernels are new
    given, (column_map, where), run = problem("rms_norm", "6:8", 7, columns, "reference")
    expected = quantize_rows(rms_norm(*given), torch.int8)[0]
    assert torch.equal(run(given, column_map, torch.int8, *where)[0], gather(expected, column_map))
    pack(torch.zeros(4, columns, dtype=torch.int8, device="cuda"), Pattern.parse("28:30"))
    _listened[(1,)](torch.zeros(1, device="cuda"))
    assert set(heard) == {"_listened"}  # there is somebody


@triton.jit
def _listened(x):
    tl.store(x, 1.0)


@pytest.mark.parametrize("backend", ["reference", "padded", "tiled"])
@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=["int8", "fp8"])
@pytest.mark.parametrize("prologue", FUSED)
def test_fused_is_one_after_the_other(prologue: str, dtype: torch.dtype, pattern: str, backend: str) -> None:
    given, (column_map, where), run = problem(prologue, pattern, 200, 3584, backend)
    values, scale, *others = run(given, column_map, dtype, *where)
    made = FUSED[prologue](*given)
    normed, *rest = made if isinstance(made, tuple) else (made,)
    wanted = quantize_rows(normed, dtype)
    # Sums of squares in another order, and an exponential that differs in its last bit: few values, by one step.
    torch.testing.assert_close(scale, wanted.scale, rtol=2**-7, atol=0)
    lifted = gather(wanted.values, column_map)
    rows = values if backend != "tiled" else from_slabs(values)
    assert (as_bits(rows) != as_bits(lifted)).float().mean() < 0.02
    torch.testing.assert_close(rows.float(), lifted.float(), rtol=2**-3, atol=1)
    assert all(torch.equal(one, other) for one, other in zip(others, rest, strict=True))


def from_slabs(values: torch.Tensor) -> torch.Tensor:
    """The rows of values [M, K'] that stand slab after slab."""
    tokens, width = values.shape
    slabs, rows, slab = SLABS.shape(tokens, width, values.element_size())
    chunks = values.as_strided((slabs, rows, 8, slab // 8), (rows * slab, slab, slab // 8, 1))
    row, chunk = torch.arange(rows).unsqueeze(1), torch.arange(8).unsqueeze(0)
    straight = as_bits(chunks)[:, row, chunk ^ row % 8]
    return straight.transpose(0, 1).reshape(rows, width)[:tokens].view(values.dtype)


@pytest.mark.parametrize("backend", ["padded", "tiled"])
@pytest.mark.parametrize("prologue", FUSED)
def test_captured(prologue: str, backend: str) -> None:
    given, (column_map, where), run = problem(prologue, "6:8", 70, 1024, backend)

    def call() -> tuple[torch.Tensor, ...]:
        return run(given, column_map, torch.int8, *where)

    eager = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for tensor in captured:
        tensor.view(torch.uint8).fill_(0x7F)
    graph.replay()
    for one, other in zip(captured, eager, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["padded", "tiled"])
def test_any_strides(backend: str) -> None:
    given, (column_map, where), run = problem("silu_mul", "6:8", 33, 512, backend)
    wide = torch.randn(33, 4 * 512, dtype=torch.bfloat16, device="cuda")
    for x in (wide[:, ::2], wide[:, 3 : 3 + 1024], given[0].T.contiguous().T):
        got, wanted = (run((rows,), column_map, torch.int8, *where) for rows in (x, x.contiguous()))
        assert torch.equal(got[0], wanted[0])
        assert torch.equal(got[1], wanted[1])


# -- launches that are remembered ----------------------------------------------------------------------------------


def test_a_remembered_launch_follows_the_current_stream() -> None:
    given, (column_map, where), run = problem("silu_mul", "6:8", 64, 512, "padded")
    (x,) = given
    wanted = run((x,), column_map, torch.int8, *where)
    late, stream = torch.zeros_like(x), torch.cuda.Stream()
    run((late,), column_map, torch.int8, *where)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # some 50 ms: on any other stream the kernel would read zeros
        late.copy_(x)
        got = run((late,), column_map, torch.int8, *where)
    stream.synchronize()
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])


def test_a_remembered_launch_belongs_to_its_types_and_alignment() -> None:
    packed = pack(torch.zeros(1, 512, dtype=torch.int8), "6:8").to("cuda")
    order, column_map = Layout(multiple=32).order(packed), packed.column_map(32)
    for source in (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16):
        for start, stride in ((0, 512), (1, 513), (0, 520), (8, 528), (0, 512)):
            x = torch.randn(9, 512, device="cuda").to(source)
            x = (
                torch.empty(9 * stride + start, dtype=source, device="cuda")
                .as_strided((9, 512), (stride, 1), start)
                .copy_(x)
            )
            for target in EIGHT_BITS:
                values, scale = ops.quantize_lift(x, column_map, target, order=order.numbers)
                wanted = quantize_rows(x, target)
                assert torch.equal(scale, wanted.scale)
                assert torch.equal(as_bits(values), as_bits(gather(wanted.values, column_map)))


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given, (column_map, where), run = problem("silu_mul", "6:8", 64, 512, "padded")
    wanted = run(given, column_map, torch.int8, *where)
    for _ in range(2):  # compiled there, then remembered
        got = run((given[0].to("cuda:1"),), column_map.to("cuda:1"), torch.int8, *where)
        assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(got, wanted, strict=True))
