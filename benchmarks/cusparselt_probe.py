"""A first look at the cuSPARSELt backend on a GPU, in about a minute.

    python benchmarks/cusparselt_probe.py [--seconds 85]

Correctness of each type on one shape; then, for the linears of Qwen2.5-7B, microseconds of: the sparse GEMM with the
library's default algorithm and with the best of the search, the whole product from quantised activations (GEMM, scales;
with exact and with bf16 accumulators), and dense through torch or vLLM. CUDA graphs, cold L2, Gaussian data. Last, host
time a call. Searches stop when the time is up; what was not searched shows the default.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import torch

from slidesparse.gemm import get_backend
from slidesparse.gemm.base import with_rows
from slidesparse.gemm.cusparselt import ACCUMULATORS, MULTIPLE, Shape, compress, plan_for, token_bucket
from slidesparse.gemm.cusparselt_tune import _random, tune_shapes
from slidesparse.gemm.dense import vllm_scaled_mm
from slidesparse.gemm.reference import apply_scales, product
from slidesparse.packed import pack
from slidesparse.pattern import Pattern
from slidesparse.prune import prune_mask
from slidesparse.slide import gather

INT8, FP8, BF16 = torch.int8, torch.float8_e4m3fn, torch.bfloat16
LINEARS = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}
PATTERNS = ("2:4", "4:6", "6:8")
L2_BYTES = 150 << 20


def check(dtype: torch.dtype) -> str:
    """One shape against the reference."""
    out, columns, m = 512, 1024, 1000
    values = torch.randn(out, columns, device="cuda")
    values *= prune_mask(values, "6:8")
    x = torch.randn(m, columns, device="cuda")
    quantise = (lambda t: (t * 32).round().clamp(-127, 127).to(INT8)) if dtype == INT8 else (lambda t: t.to(dtype))
    weight, x = quantise(values), quantise(x)
    scales = (
        (torch.rand(m, 1, device="cuda"), torch.rand(out, device="cuda")) if dtype in ACCUMULATORS else (None, None)
    )
    packed = pack(weight, "6:8", scale=scales[1])
    backend = get_backend("cusparselt")
    lifted = gather(x, backend.layout.column_map(packed))
    y = backend.matmul(lifted, scales[0], backend.prepare(packed), scales[1], None, out, BF16)
    expected = apply_scales(product(x, weight), *scales, None, BF16)
    error = (y.double() - expected.double()).abs().max() / expected.double().abs().max()
    return f"{dtype}: equal bits {torch.equal(y, expected)}, largest error / largest output {float(error):.2e}"


def check_large() -> str:
    """Accumulators that float32 does not hold."""
    weight = torch.full((32, 8192), -128, dtype=INT8, device="cuda").view(32, -1, 4)
    weight[..., 2:] = 0
    weight[:, 0, 0] = 127
    weight = weight.view(32, 8192)
    x = torch.full((32, 8192), -128, dtype=INT8, device="cuda")
    x[:, 0] = torch.arange(32)
    exact, acc = product(x, weight), torch.empty(32, 32, dtype=torch.int32, device="cuda")
    plan_for(Shape(0, 32, 8192, 8192, 32, INT8, torch.int32)).run(compress(weight), x.data_ptr(), acc)
    same, rounded = torch.equal(acc, exact), torch.equal(acc.float(), exact.float())
    return f"int32 accumulators beyond 2^24: exact {same}; exact as float32 {rounded}"


def time_us(calls: list[Callable[[], object]]) -> float:
    """Median time of one of these calls, in turn, from a CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return sorted(times)[2]


def copies(*tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """As many copies as L2 could not hold."""
    n_bytes = sum(t.numel() * t.element_size() for t in tensors)
    return [tensors] + [tuple(t.clone() for t in tensors) for _ in range(min(16, -(-L2_BYTES // n_bytes)))]


def linear_us(name: str, out: int, columns: int, m: int, dtype: torch.dtype) -> float:
    """A whole product from quantised activations, by a backend."""
    backend = get_backend(name)
    if backend.layout.lifted:
        weight = compress(_random(out, columns, dtype, sparse=True))
    else:
        weight = _random(out, columns, dtype)
    x = _random(backend.layout.rows(m), columns, dtype)[:m]
    scale_x, scale_w = torch.rand(m, 1, device="cuda"), torch.rand(out, device="cuda")
    one = torch.ones((), device="cuda")

    def call(weight: torch.Tensor, x: torch.Tensor) -> Callable[[], object]:
        operand = (weight,) if backend.layout.lifted or dtype == INT8 else (weight, one)
        return lambda: backend.matmul(with_rows(x, len(x)), scale_x, operand, scale_w, None, out, BF16)

    return time_us([call(*tensors) for tensors in copies(weight, x)])


def host_us(call: Callable[[], object], calls: int = 200) -> float:
    """Time of a call that nobody waits for."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def host_times() -> None:
    """Print what a small product costs the host."""
    out, columns, m = 512, 1024, 32
    weight, x = compress(_random(out, columns, INT8, sparse=True)), _random(m, columns, INT8)
    scale_x, scale_w = torch.rand(m, 1, device="cuda"), torch.rand(out, device="cuda")
    plan = plan_for(Shape(0, out, columns, columns, m, INT8, torch.int32))
    acc = torch.empty(m, out, dtype=torch.int32, device="cuda")
    from slidesparse.kernels.scale import scale_rows

    backend, dense = get_backend("cusparselt"), _random(out, columns, INT8)
    operator = torch.ops.slidesparse.gemm
    parts = {
        "plan.run": lambda: plan.run(weight, x.data_ptr(), acc),
        "scale_rows": lambda: scale_rows(acc, None, scale_x, scale_w, None, m, out, BF16),
        "matmul": lambda: backend.matmul(x, scale_x, (weight,), scale_w, None, out, BF16),
        "ops.gemm": lambda: operator(x, scale_x, [weight], scale_w, None, out, BF16, "cusparselt"),
        "dense ops.gemm": lambda: operator(x, scale_x, [dense], scale_w, None, out, BF16, "dense"),
    }
    print("host us a call: " + ", ".join(f"{name} {host_us(call):.1f}" for name, call in parts.items()))


def main() -> None:
    """Run everything and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=85.0)
    deadline = time.perf_counter() + parser.parse_args().seconds
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    torch.manual_seed(0)
    for dtype in (INT8, FP8, BF16):
        print(check(dtype))
    print(check_large())
    host_times()
    print(f"dense through {'vLLM' if vllm_scaled_mm() else 'torch'}")
    print("| type | M | linear | dense | pattern | GEMM default | best | id, split | exact | bf16 | dense / exact |")
    print("|---" * 11 + "|")
    for m in (1024, 16384):
        for dtype in (INT8, FP8):
            for name, (out, columns) in LINEARS.items():
                dense = linear_us("dense", out, columns, m, dtype)
                for text in PATTERNS:
                    pattern = Pattern.parse(text)
                    lifted = pattern.groups(columns) * pattern.slid_group
                    lifted += -lifted % MULTIPLE
                    found = "-", "-", "-"
                    if time.perf_counter() < deadline - 15:
                        record = tune_shapes([(out, lifted)], [m], dtype)[0]
                        best = "default" if record.best is None else f"{record.best.id}, {record.best.split_k}"
                        found = f"{record.default_us:.1f}", f"{record.time_us:.1f}", best
                    exact, rounded = (linear_us(b, out, lifted, m, dtype) for b in ("cusparselt", "cusparselt-bf16"))
                    row = (str(dtype)[6:11], m, name, f"{dense:.1f}", text, *found, f"{exact:.1f}", f"{rounded:.1f}")
                    print("| " + " | ".join(map(str, row)) + f" | {dense / exact:.2f} |", flush=True)
    print(f"bucket of 1000 tokens: {token_bucket(1000)}; {deadline - time.perf_counter():.0f} s left")


if __name__ == "__main__":
    main()
