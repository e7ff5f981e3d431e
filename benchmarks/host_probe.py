"""Host time of a steady call: operators, whole layers, and what they are made of.

    PYTHONPATH=src python3 benchmarks/host_probe.py

Each figure is that of the fastest of several blocks of calls, which are queued without waiting for the device, at
shapes whose device time is shorter than their host time's aim: other programs on the host make blocks slower, never
faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from slidesparse import ops
from slidesparse.errors import SlideSparseError
from slidesparse.gemm import Problem, get_backend
from slidesparse.layer.linear import SlideLinear
from slidesparse.pruning import prune_mask
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.packing import pack
from slidesparse.weights.quant import dtype_name
from slidesparse_bench.kernels.dense import vllm_ops, vllm_quantize

BLOCKS, CALLS = 25, 40
TOKENS, COLUMNS, OUT = 64, 2048, 2048
BF16 = torch.bfloat16


def host_us(call: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    blocks = []
    for _ in range(BLOCKS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        blocks.append((time.perf_counter() - begin) / CALLS)
    torch.cuda.synchronize()
    return min(blocks) * 1e6


def weight(pattern: str, dtype: torch.dtype) -> PackedWeight:
    dense = torch.randn(OUT, COLUMNS, device="cuda")
    dense = torch.where(prune_mask(dense, pattern), dense, 0)
    return pack((dense * 30).clamp(-127, 127).to(dtype), pattern, scale=torch.ones(OUT, device="cuda"))


def lifting(pattern: str, dtype: torch.dtype, backend: str) -> Iterator[tuple[str, Callable[[], object]]]:
    packed, layout = weight(pattern, dtype), get_backend(backend).layout
    columns, column_map = layout.order(packed), layout.column_map(packed)
    where = (column_map, dtype, backend, columns.numbers)
    x = torch.randn(TOKENS, COLUMNS, dtype=BF16, device="cuda")
    label = f"{pattern} {dtype_name(dtype)} {backend}"
    yield f"quantize_lift {label}", lambda: ops.quantize_lift(x, *where)


def multiplying(pattern: str, dtype: torch.dtype, backend: str) -> Iterator[tuple[str, Callable[[], object]]]:
    packed, chosen = weight(pattern, dtype), get_backend(backend)
    reason = chosen.why_not(Problem(packed.pattern, dtype, OUT, COLUMNS, packed.device))
    if reason is not None:
        print(f"{backend}: {reason}")
        return
    columns, column_map = chosen.layout.order(packed), chosen.layout.column_map(packed)
    x = torch.randn(TOKENS, COLUMNS, dtype=BF16, device="cuda")
    values, scale = ops.quantize_lift(x, column_map, dtype, backend, columns.numbers)
    operand = list(chosen.prepare(packed))
    rest = (packed.scale, None, OUT, BF16, backend)
    layer = SlideLinear(packed, backend=backend)
    label = f"{pattern} {dtype_name(dtype)} {backend}"
    yield f"gemm {label}", lambda: ops.gemm(values, scale, operand, *rest)
    yield f"SlideLinear {label}", lambda: layer(x)


def vllms(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    """vLLM's own dense layer: its quantisation, then its CUTLASS kernel."""
    vllm = vllm_ops()
    if vllm is None:
        print("vLLM: not installed")
        return
    x = torch.randn(TOKENS, COLUMNS, dtype=BF16, device="cuda")
    w, scale_w = weight("6:8", dtype).unpack().t(), torch.ones(OUT, 1, device="cuda")
    values, scale = vllm_quantize(x, dtype)

    def layer() -> torch.Tensor:
        values, scale = vllm_quantize(x, dtype)
        return vllm.cutlass_scaled_mm(values, w, scale, scale_w, BF16)

    name = dtype_name(dtype)
    yield f"vLLM quantise {name}", lambda: vllm_quantize(x, dtype)
    yield f"vLLM gemm {name}", lambda: vllm.cutlass_scaled_mm(values, w, scale, scale_w, BF16)
    yield f"vLLM layer {name}", layer


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    x = torch.randn(TOKENS, COLUMNS, dtype=BF16, device="cuda")
    dense = torch.nn.Linear(COLUMNS, OUT, bias=False, dtype=BF16, device="cuda")
    yield "torch.empty", lambda: torch.empty(TOKENS, COLUMNS, dtype=BF16, device="cuda")
    yield "x + x", lambda: x + x
    yield "nn.Linear bf16", lambda: dense(x)
    yield from lifting("6:8", torch.int8, "cusparselt")
    yield from lifting("6:8", torch.float8_e4m3fn, "cusparselt")
    yield from lifting("6:8", torch.int8, "hopper")
    yield from vllms(torch.int8)
    yield from vllms(torch.float8_e4m3fn)
    for backend in ("cusparselt", "hopper", "dense"):
        yield from multiplying("6:8", torch.int8, backend)


def main() -> None:
    modes: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
    }
    print(f"{'M=64, K=N=2048':48s}" + "".join(f"{name:>16s}" for name in modes))
    for label, call in cases():
        times = []
        try:
            for mode in modes.values():
                with mode():
                    times.append(f"{host_us(call):13.1f} us")
        except (SlideSparseError, RuntimeError) as error:
            times.append(str(error).partition("\n")[0])
        print(f"{label:48s}" + "".join(times), flush=True)


if __name__ == "__main__":
    main()
