"""Lifts with a prologue on a GPU: the numbers of their definitions, and launches that are remembered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from fused_lifts import fused_lift
from triton import knobs

from slidesparse import Pattern, pack
from slidesparse.gemm import get_backend
from slidesparse.lifting.prologue import Prologue, add_rms_norm, rms_norm, silu_mul
from slidesparse.weights.quant import quantize_rows
from slidesparse.weights.slide import gather
from slidesparse.weights.support import as_bits

pytestmark = pytest.mark.gpu

EPS = 1e-6
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]
FUSED = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "silu_mul": silu_mul}


def problem(prologue: Prologue, pattern: str, tokens: int, columns: int) -> tuple[tuple[Any, ...], torch.Tensor, Any]:
    """Inputs, the column map, and the lift of other inputs."""
    packed = pack(torch.zeros(1, columns, dtype=torch.int8), pattern).to("cuda")
    layout = get_backend("reference").layout
    column_map, order = layout.column_map(packed), layout.order(packed)
    x, residual = torch.randn(2, tokens, columns, dtype=torch.bfloat16, device="cuda").unbind(0)
    gain = torch.randn(columns, dtype=torch.bfloat16, device="cuda")
    given = {
        "rms_norm": (x, gain, EPS),
        "add_rms_norm": (x, residual, gain, EPS),
        "silu_mul": (torch.cat([x, residual], 1),),
    }[prologue]

    def run(*given: Any, dtype: torch.dtype = torch.int8) -> tuple[torch.Tensor, ...]:
        return fused_lift(prologue, given, column_map.to(given[0].device), dtype, order=order.numbers)

    return given, column_map, run


def test_a_kernel_compiles_while_somebody_listens_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM does once it serves."""
    heard: list[str] = []
    for hook in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(knobs.runtime, hook, lambda fn, **_: heard.append(fn.name))
    columns = 1234  # of no other test, so that these kernels are new
    given, column_map, run = problem("rms_norm", "6:8", 7, columns)
    expected = quantize_rows(rms_norm(*given), torch.int8)[0]
    assert torch.equal(run(*given)[0], gather(expected, column_map))
    pack(torch.zeros(4, columns, dtype=torch.int8, device="cuda"), Pattern.parse("28:30"))
    _listened[(1,)](torch.zeros(1, device="cuda"))
    assert set(heard) == {"_listened"}  # there is somebody


@triton.jit
def _listened(x):
    tl.store(x, 1.0)


@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=["int8", "fp8"])
@pytest.mark.parametrize("prologue", FUSED)
def test_fused_is_one_after_the_other(prologue: Prologue, dtype: torch.dtype, pattern: str) -> None:
    given, column_map, run = problem(prologue, pattern, 200, 3584)
    values, scale, *others = run(*given, dtype=dtype)
    made = FUSED[prologue](*given)
    normed, *rest = made if isinstance(made, tuple) else (made,)
    wanted = quantize_rows(normed, dtype)
    # Sums of squares in another order, and an exponential that differs in its last bit: few values, by one step.
    torch.testing.assert_close(scale, wanted.scale, rtol=2**-7, atol=0)
    lifted = gather(wanted.values, column_map)
    assert (as_bits(values) != as_bits(lifted)).float().mean() < 0.02
    torch.testing.assert_close(values.float(), lifted.float(), rtol=2**-3, atol=1)
    assert all(torch.equal(one, other) for one, other in zip(others, rest, strict=True))


def test_a_remembered_launch_follows_the_current_stream() -> None:
    (x,), _, run = problem("silu_mul", "6:8", 64, 512)
    wanted = run(x)
    late, stream = torch.zeros_like(x), torch.cuda.Stream()
    run(late)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # some 50 ms: on any other stream the kernel would read zeros
        late.copy_(x)
        got = run(late)
    stream.synchronize()
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given, _, run = problem("silu_mul", "6:8", 64, 512)
    wanted = run(*given)
    for _ in range(2):  # compiled there, then remembered
        got = run(given[0].to("cuda:1"))
        assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(got, wanted, strict=True))
