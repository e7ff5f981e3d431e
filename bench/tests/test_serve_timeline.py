"""A profile of engine steps, reduced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slidesparse_bench.serve.serve_timeline import by_class, read_steps, reduce_steps


def event(kind: str, name: str, start: float, length: float, correlation: int | None = None) -> dict[str, Any]:
    arguments = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length, "args": arguments}


def mark(start: float, prompts: int, tokens: int, decoding: int) -> dict[str, Any]:
    return event(
        "user_annotation", f"execute_context_{prompts}({tokens})_generation_{decoding}({decoding})", start, 40.0
    )


EVENTS = [
    {"ph": "M", "name": "process_name"},
    mark(200.0, 0, 0, 256),  # not in order
    mark(100.0, 2, 700, 254),
    mark(300.0, 0, 0, 256),
    event("user_annotation", "gpu_model_runner: forward", 110.0, 20.0),
    event("cpu_op", "aten::mm", 111.0, 5.0),
    event("cuda_runtime", "cudaLaunchKernel", 50.0, 1.0, 9),  # before the first step
    event("cuda_driver", "cuLaunchKernelEx", 112.0, 3.0, 1),
    event("cuda_runtime", "cudaLaunchKernel", 150.0, 2.0, 2),  # sampling, after the mark's end
    event("cuda_runtime", "cudaGraphLaunch", 210.0, 8.0, 3),
    event("cuda_runtime", "cudaGraphLaunch", 310.0, 8.0, 4),
    event("kernel", "early", 60.0, 9.0, 9),
    event("kernel", "sparse_gemm", 120.0, 50.0, 1),
    event("kernel", "resident_kernel", 160.0, 30.0, 2),  # overlaps by 10
    event("kernel", "flash::attention", 205.0, 4.0, 2),  # of the first step, though it runs in the second
    event("kernel", "sparse_gemm", 220.0, 10.0, 3),
    event("gpu_memcpy", "Memcpy", 240.0, 1.0, 3),
    event("kernel", "sparse_gemm", 330.0, 10.0, 4),
]


def test_what_a_step_launched_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": EVENTS}))
    first, second = read_steps(tmp_path / "t.json")  # the end of the third is not known
    assert (first.tokens, first.prompts, first.requests) == (954, 2, 256)
    assert (first.wall_us, first.host_us, first.gpu_us, first.lead_us) == (100.0, 40.0, 100.0, 20.0)
    assert first.busy_us == 50 + 20 + 4
    assert first.kernels_us == {"lift": 30.0, "attention": 4.0, "gemm": 50.0, "elementwise": 0.0, "rest": 0.0}
    assert first.launches == 3
    assert first.calls_us == {"cuLaunchKernelEx": 3.0, "cudaLaunchKernel": 2.0}
    assert first.scopes_us == {"forward": 20.0}
    assert (second.tokens, second.prompts, second.requests) == (256, 0, 256)
    assert (second.busy_us, second.gpu_us, second.lead_us) == (11.0, 110.0, 20.0)


@pytest.mark.parametrize("kept", [0, 3])
def test_a_trace_without_two_steps_has_none(kept: int) -> None:
    assert reduce_steps(EVENTS[:kept]) == []


def test_kernels_are_told_apart_by_their_names() -> None:
    names = {
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>": "attention",
        "void cutlass::device_kernel<enable_sm90_or_later<cutlass::gemm::kernel::GemmUniversal<...>>>": "gemm",
        "sparse_gemm": "gemm",
        "nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT": "gemm",
        "triton_red_fused_cutlass_scaled_mm_fused_add_rms_norm_2": "elementwise",
        "sm90_xmma_sparse_gemm_i8i32_i8i32_i32_tn_n": "gemm",
        "scale_kernel": "gemm",
        "resident_kernel": "lift",
        "void vllm::dynamic_scaled_int8_quant_kernel<c10::BFloat16, float>": "elementwise",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "elementwise",
        "void vllm::reshape_and_cache_flash_kernel<...>": "rest",
        "Memcpy HtoD (Pinned -> Device)": "rest",
    }
    for name, kind in names.items():
        assert by_class({name: 2.0})[kind] == 2.0, name
