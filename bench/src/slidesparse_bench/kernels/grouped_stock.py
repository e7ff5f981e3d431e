"""vLLM's own experts, dense, with the tiles that vLLM would take: what ``bench gemm --grouped`` compares with.

INT8 runs by the Triton kernel of ``fused_moe``, FP8 by CUTLASS's grouped GEMM: what vLLM chooses on a Hopper GPU for
weights with a scale a channel and activations with one a token. The order of the tokens is made before the clock runs
where a product is timed alone, and is part of the time where a layer is.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from slidesparse.errors import UnsupportedError
from slidesparse_bench.expert_sizes import DOWN, GATE_UP, ExpertSizes
from slidesparse_bench.kernels.dense import vllm_ops, vllm_quantize
from slidesparse_bench.kernels.expert_operands import DenseExperts

T = TypeVar("T")

FUSED_MOE = "vllm.model_executor.layers.fused_moe"

SWAPPED = 64
"""The most rows with which vLLM lets CUTLASS swap the operands (``run_cutlass_moe_fp8``)."""


@dataclass(frozen=True)
class Stock:
    """A call of vLLM's.

    Attributes:
        algorithm: Its name.
        run: The call.
        operands: Its arguments.
        rows: int64, the row of every pair in the result; of a layer the row of every token.
    """

    algorithm: str
    run: Callable[..., torch.Tensor]
    operands: tuple[Any, ...]
    rows: torch.Tensor


def is_here() -> bool:
    """Return whether vLLM's operators can be imported."""
    return vllm_ops() is not None


def stock_product(
    part: str, x: torch.Tensor, chosen: torch.Tensor, sizes: ExpertSizes, dense: DenseExperts, dtype: torch.dtype
) -> Stock:
    """Return one product of all experts, on activations that are quantised.

    Args:
        part: Which.
        x: [M, H] for gate and up; [M k, I] for down.
        chosen: int32 [M, k].
        sizes: The layer.
        dense: Its experts.
        dtype: Of the weights.

    Raises:
        UnsupportedError: This vLLM has no such kernel, or another way to call it.
    """
    make = _triton_product if dtype == torch.int8 else _cutlass_product
    return _refusing(lambda: make(part, *vllm_quantize(x, dtype), chosen, sizes, dense))


def stock_layer(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    sizes: ExpertSizes,
    dense: DenseExperts,
    dtype: torch.dtype,
) -> Stock:
    """Return the whole layer: x [M, H] -> [M, H]; see :func:`stock_product`.

    Raises:
        UnsupportedError: This vLLM has no such kernel, or another way to call it.
    """
    make = _triton_layer if dtype == torch.int8 else _cutlass_layer
    return _refusing(lambda: make(x, weights, chosen, sizes, dense))


def _refusing(make: Callable[[], Stock]) -> Stock:
    """Make a call that refuses what a vLLM of another release lacks: that is not the end of a run."""
    made = _as_refusal(make)
    return replace(made, run=lambda *operands: _as_refusal(lambda: made.run(*operands)))


def _as_refusal(call: Callable[[], T]) -> T:
    try:
        return call()
    except (ImportError, AttributeError, TypeError, AssertionError) as error:
        raise UnsupportedError(
            "vLLM's experts", got=f"{type(error).__name__}: {error}".partition("\n")[0], needed="vLLM 0.22 to 0.33"
        ) from error


def _of_moe(module: str) -> Any:
    return importlib.import_module(f"{FUSED_MOE}.{module}")


# -- Triton -----------------------------------------------------------------------------------------------------------


def _triton_product(
    part: str,
    values: torch.Tensor,
    scale: torch.Tensor,
    chosen: torch.Tensor,
    sizes: ExpertSizes,
    dense: DenseExperts,
) -> Stock:
    import triton.language as tl

    fused_moe = _of_moe("fused_moe")
    shapes = tuple(dense.values[name].shape for name in (GATE_UP, DOWN))
    # vLLM looks INT8's tiles up under the name of BF16's.
    config = fused_moe.try_get_optimal_moe_config(*shapes, sizes.top_k, None, len(chosen))
    order = fused_moe._prepare_expert_assignment(chosen, config, *chosen.shape, sizes.experts, None)
    top_k = sizes.top_k if part == GATE_UP else 1
    out = dense.values[part].shape[1]

    def run(
        values: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, scale_w: torch.Tensor, order: Any
    ) -> torch.Tensor:
        y = torch.empty(*chosen.shape, out, dtype=torch.bfloat16, device=values.device)
        fused_moe.invoke_fused_moe_triton_kernel(
            *(values, weight, y, scale, scale_w, None, *order, False, top_k, config),
            compute_type=tl.bfloat16,
            use_fp8_w8a8=False,
            use_int8_w8a8=True,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=True,
        )
        return y.view(-1, out)

    operands = (values, scale, dense.values[part], dense.scales[part], order)
    return Stock("triton fused_moe", run, operands, torch.arange(chosen.numel(), device=chosen.device))


def _triton_layer(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, sizes: ExpertSizes, dense: DenseExperts
) -> Stock:
    fused_moe, config = _of_moe("fused_moe"), _of_moe("config")

    def run(
        x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, w13: Any, w2: Any, s13: Any, s2: Any
    ) -> torch.Tensor:
        quant = config.int8_w8a8_moe_quant_config(s13, s2, None, None, per_act_token_quant=True)
        y: torch.Tensor = fused_moe.fused_experts(x, w13, w2, weights, chosen, quant_config=quant)
        return y

    return Stock("triton fused_experts", run, (x, weights, chosen, *_tensors(dense)), _tokens(x))


# -- CUTLASS ----------------------------------------------------------------------------------------------------------


def _cutlass_product(
    part: str,
    values: torch.Tensor,
    scale: torch.Tensor,
    chosen: torch.Tensor,
    sizes: ExpertSizes,
    dense: DenseExperts,
) -> Stock:
    ops, device = vllm_ops(), chosen.device
    order = chosen.flatten().to(torch.int64).argsort(stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
    source = order // sizes.top_k if part == GATE_UP else order
    counts = torch.bincount(chosen.flatten(), minlength=sizes.experts)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    first, second = (torch.empty(sizes.experts, 3, dtype=torch.int32, device=device) for _ in range(2))
    ops.get_cutlass_moe_mm_problem_sizes_from_expert_offsets(
        offsets, first, second, sizes.inner, sizes.hidden, len(order) <= SWAPPED
    )
    out, columns = sizes.shape(part)
    strides = [torch.full((sizes.experts,), n, dtype=torch.int64, device=device) for n in (columns, out)]

    def run(
        values: torch.Tensor, scale: torch.Tensor, weight: Any, scale_w: Any, starts: Any, problems: Any
    ) -> torch.Tensor:
        y = torch.empty(len(values), out, dtype=torch.bfloat16, device=device)
        ops.cutlass_moe_mm(
            *(y, values, weight, scale, scale_w, starts, problems, strides[0], strides[0], strides[1], True, True)
        )
        return y

    problems = first if part == GATE_UP else second
    operands = (values[source], scale[source], dense.values[part], dense.scales[part], offsets[:-1], problems)
    return Stock("cutlass_moe_mm", run, operands, rows)


def _cutlass_layer(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, sizes: ExpertSizes, dense: DenseExperts
) -> Stock:
    cutlass_moe = _of_moe("experts.cutlass_moe")
    activation = _of_moe("activation").MoEActivation.SILU
    device, rows = x.device, chosen.numel()
    strides = {n: torch.full((sizes.experts,), n, dtype=torch.int64, device=device) for n in _widths(sizes)}
    hidden, inner, both = _widths(sizes)
    call = cutlass_moe.run_cutlass_moe_fp8
    more = {"permute_scratch": None} if "permute_scratch" in inspect.signature(call).parameters else {}

    def run(
        x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, w13: Any, w2: Any, s13: Any, s2: Any
    ) -> torch.Tensor:
        values, scale = vllm_quantize(x, w13.dtype)
        y = torch.empty_like(x)
        spaces = [torch.empty(rows * max(n, hidden), dtype=x.dtype, device=device) for n in (both, inner)]
        call(
            *(y, values, w13, w2, chosen, activation, sizes.experts, None, s13, s2, scale, None),
            *(strides[hidden], strides[inner], strides[both], strides[hidden]),
            *(*spaces, None, x.dtype, True, True, False, weights),
            **more,
        )
        return y

    return Stock("cutlass_moe_mm", run, (x, weights, chosen, *_tensors(dense)), _tokens(x))


def _widths(sizes: ExpertSizes) -> tuple[int, int, int]:
    return sizes.hidden, sizes.inner, 2 * sizes.inner


def _tensors(dense: DenseExperts) -> tuple[torch.Tensor, ...]:
    return tuple(kept[part] for kept in (dense.values, dense.scales) for part in (GATE_UP, DOWN))


def _tokens(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x), device=x.device)
