"""vLLM's experts as the benchmark calls them: what a kernel is handed, and the rows that it fills, without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slidesparse.gemm.reference import apply_scales, product
from slidesparse.tuning.checking import relative_error
from slidesparse.weights.quant import quantize_rows
from slidesparse_bench.expert_sizes import DOWN, GATE_UP, ExpertSizes
from slidesparse_bench.kernels import grouped_stock
from slidesparse_bench.kernels.expert_operands import dense_experts, expected_layer, expected_product
from slidesparse_bench.kernels.mixtures import draw

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")

CPU = torch.device("cpu")
SIZES = ExpertSizes(hidden=64, inner=48, experts=32, top_k=2)
TOKENS = 3


@pytest.fixture(autouse=True)
def quantiser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_stock, "vllm_quantize", quantize_rows)


@pytest.fixture
def chosen() -> torch.Tensor:
    return draw("skewed", TOKENS, SIZES, CPU)


def bound(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """The arguments of a call by their names, as the real function would get them."""
    signature = inspect.signature(function)
    return lambda *given, **named: signature.bind(*given, **named).arguments


def multiplied(x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, scale_w: torch.Tensor) -> torch.Tensor:
    return apply_scales(product(x, weight), scale, scale_w.flatten(), None, torch.bfloat16)


def x_of(part: str) -> torch.Tensor:
    rows, columns = (TOKENS, SIZES.hidden) if part == GATE_UP else (TOKENS * SIZES.top_k, SIZES.inner)
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def exact(part: str, x: torch.Tensor, chosen: torch.Tensor, dtype: str) -> torch.Tensor:
    of_pair = torch.arange(chosen.numel()) // (SIZES.top_k if part == GATE_UP else 1)
    dense = dense_experts(SIZES, dtype, CPU)
    return expected_product(x[of_pair], chosen.flatten().tolist(), dense.matrices(part), torch.float32)


@pytest.mark.parametrize("part", [GATE_UP, DOWN])
def test_the_triton_kernel_gets_every_pair(monkeypatch: pytest.MonkeyPatch, chosen: torch.Tensor, part: str) -> None:
    fused_moe = import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    arguments = bound(fused_moe.invoke_fused_moe_triton_kernel)

    def kernel(*given: Any, **named: Any) -> None:
        got = arguments(*given, **named)
        assert got["use_int8_w8a8"]
        assert got["per_channel_quant"]
        assert not got["mul_routed_weight"]
        assert got["sorted_token_ids"] is None  # few pairs: a block for each
        assert got["B_scale"].shape == (*got["B"].shape[:2], 1)
        flat = got["C"].view(-1, got["C"].shape[-1])
        for pair, expert in enumerate(got["expert_ids"].tolist()):
            row = slice(pair // got["top_k"], pair // got["top_k"] + 1)
            flat[pair] = multiplied(got["A"][row], got["A_scale"][row], got["B"][expert], got["B_scale"][expert])[0]

    monkeypatch.setattr(fused_moe, "invoke_fused_moe_triton_kernel", kernel)
    x = x_of(part)
    made = grouped_stock.stock_product(part, x, chosen, SIZES, dense_experts(SIZES, "int8", CPU), torch.int8)
    y = made.run(*made.operands)[made.rows]
    assert relative_error(y, exact(part, x, chosen, "int8")) < 5e-3


@pytest.mark.parametrize("part", [GATE_UP, DOWN])
def test_cutlass_gets_every_expert(monkeypatch: pytest.MonkeyPatch, chosen: torch.Tensor, part: str) -> None:
    real = import_module("vllm._custom_ops")
    sizes_of, arguments = map(bound, (real.get_cutlass_moe_mm_problem_sizes_from_expert_offsets, real.cutlass_moe_mm))

    def problem_sizes(*given: Any) -> None:
        got = sizes_of(*given)
        assert (got["n"], got["k"], got["swap_ab"]) == (SIZES.inner, SIZES.hidden, True)
        counts = got["expert_first_token_offset"].diff()
        got["problem_sizes1"][:, 0], got["problem_sizes2"][:, 0] = counts, counts

    def kernel(*given: Any) -> None:
        got = arguments(*given)
        assert got["per_act_token"]
        assert got["per_out_ch"]
        assert got["a_strides"].tolist() == [got["a_tensors"].shape[1]] * SIZES.experts
        assert got["c_strides"].tolist() == [got["out_tensors"].shape[1]] * SIZES.experts
        counts = got["problem_sizes"][:, 0].tolist()
        for expert, start in enumerate(got["expert_offsets"].tolist()):
            own = slice(start, start + counts[expert])
            weight = got["b_tensors"][expert], got["b_scales"][expert]
            got["out_tensors"][own] = multiplied(got["a_tensors"][own], got["a_scales"][own], *weight)

    ops = SimpleNamespace(cutlass_moe_mm=kernel, get_cutlass_moe_mm_problem_sizes_from_expert_offsets=problem_sizes)
    monkeypatch.setattr(grouped_stock, "vllm_ops", lambda: ops)
    x, dtype = x_of(part), torch.float8_e4m3fn
    made = grouped_stock.stock_product(part, x, chosen, SIZES, dense_experts(SIZES, "fp8", CPU), dtype)
    y = made.run(*made.operands)[made.rows]
    assert relative_error(y, exact(part, x, chosen, "fp8")) < 5e-3


@pytest.mark.parametrize(
    ("dtype", "module", "name"),
    [(torch.int8, "fused_moe", "fused_experts"), (torch.float8_e4m3fn, "experts.cutlass_moe", "run_cutlass_moe_fp8")],
)
def test_a_layer_is_called_as_this_vllm_wants_it(
    monkeypatch: pytest.MonkeyPatch, chosen: torch.Tensor, dtype: torch.dtype, module: str, name: str
) -> None:
    place = import_module(f"vllm.model_executor.layers.fused_moe.{module}")
    real = getattr(place, name)
    arguments, seen = bound(real), []
    short = "int8" if dtype == torch.int8 else "fp8"
    dense = dense_experts(SIZES, short, CPU)
    x, weights = x_of(GATE_UP), torch.rand(TOKENS, SIZES.top_k)
    result = expected_layer(x, weights, chosen, dense.matrices(GATE_UP), dense.matrices(DOWN)).to(x.dtype)

    def call(*given: Any, **named: Any) -> torch.Tensor:
        got = arguments(*given, **named)
        seen.append(got)
        assert torch.equal(got["topk_ids"], chosen)
        assert torch.equal(got["topk_weights"], weights)
        assert (got["w1"].shape[1], got["w2"].shape[1]) == (2 * SIZES.inner, SIZES.hidden)
        return got["output"].copy_(result) if "output" in got else result

    call.__signature__ = inspect.signature(real)  # type: ignore[attr-defined]
    monkeypatch.setattr(place, name, call)
    made = grouped_stock.stock_layer(x, weights, chosen, SIZES, dense, dtype)
    assert torch.equal(made.run(*made.operands)[made.rows], result)
    (got,) = seen
    if dtype == torch.int8:
        assert got["quant_config"].use_int8_w8a8
        assert got["quant_config"].per_act_token_quant
    else:
        widths = [got[f"{of}_strides{number}"][0].item() for of in ("ab", "c") for number in (1, 2)]
        assert widths == [SIZES.hidden, SIZES.inner, 2 * SIZES.inner, SIZES.hidden]
        spaces = [got[name].numel() // chosen.numel() for name in ("workspace13", "workspace2")]
        assert spaces == [max(2 * SIZES.inner, SIZES.hidden), max(SIZES.inner, SIZES.hidden)]
