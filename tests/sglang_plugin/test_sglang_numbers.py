"""A sparse layer gives the bits of SGLang's dense one: its own quantiser, run in Triton's interpreter, and its loaders.

Of SGLang's compiled parts one is replaced: ``int8_scaled_mm``, by the exact product and the epilogue of its formula.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_sglang_plugin import config_of, loaded, oracle, pruned

import slidesparse as ss
from slidesparse.gemm.reference import apply_scales, product
from slidesparse.weights.quant import quantize_rows, quantize_weight

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
HIDDEN = 48


@pytest.fixture
def stock(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of SGLang's INT8 scheme, which now runs on a CPU."""
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a8_int8 as module
    from triton import language as tl
    from triton.runtime import interpreter

    def ties_away(x: Any) -> Any:
        """libdevice's round: ``roundf`` of C."""
        wide = x.handle.data.astype(np.float64)
        rounded = np.copysign(np.floor(np.abs(wide) + 0.5), wide).astype(np.float32)
        return tl.tensor(interpreter.TensorHandle(rounded, tl.float32), x.type)

    def multiply(
        x: torch.Tensor, w: torch.Tensor, scale_x: torch.Tensor, scale_w: torch.Tensor, out_dtype: Any, bias: Any
    ) -> torch.Tensor:
        return apply_scales(product(x, w.T), scale_x, scale_w.flatten(), bias, out_dtype)

    monkeypatch.setattr(tl.extra.cuda.libdevice, "round", ties_away)
    monkeypatch.setattr(module, "int8_scaled_mm", multiply, raising=False)
    return module


def rows(columns: int) -> torch.Tensor:
    """Rows of every kind: float32 [9, columns]."""
    x = torch.randn(9, columns)
    x[1] = 0.0
    x[2] = (torch.arange(columns) % 255 - 127) / 2  # ties, and 63.5 of 127
    x[2, 0] = 127.0
    x[3] = (torch.arange(columns) % 2 - 0.5) * 2.0
    x[3, :2] = torch.tensor([2.0, -2.0])  # half of absmax
    x[4] *= 1e-39
    x[5] = x[5].clamp(-2, 2) * 3e4
    x[6] *= 3e-11  # below the least absmax
    x[7, columns // 2] = 3e4
    return x


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_activations_are_quantised_as_by_sglangs_own_kernel(stock: Any, dtype: torch.dtype) -> None:
    x = rows(300).to(dtype)
    values, scale = stock.per_token_quant_int8(x)
    ours, ours_vllm = quantize_rows(x, torch.int8, "sglang"), quantize_rows(x, torch.int8)
    assert torch.equal(ours.values, values)
    assert torch.equal(ours.scale, scale)
    assert not torch.equal(ours_vllm.values, values)


@pytest.mark.usefixtures("stock")
def test_a_sparse_layer_gives_the_bits_of_the_dense_one() -> None:
    name, weight, x = "model.layers.0.mlp.down_proj", pruned("6:8"), rows(96).bfloat16()
    sparse, dense = loaded(config_of(), name, *weight), loaded(config_of(None, None), name, *weight)
    assert hasattr(sparse, "slide")
    assert not hasattr(dense, "slide")
    assert torch.equal(sparse(x)[0], dense(x)[0])
    assert torch.equal(sparse(x)[0], oracle(x, *weight))


# -- sizes that SGLang pads ----------------------------------------------------------------------------------------


def padded_size(inner: int, ranks: int) -> int:
    """The inner size of a model on a CPU: SGLang adds zeros until every rank has a multiple of 32."""
    from sglang.srt.configs import update_config

    config = SimpleNamespace(intermediate_size=inner)
    update_config.update_intermediate_size(config, "intermediate_size", ranks * update_config.DEFAULT_MOE_PADDING_SIZE)
    return config.intermediate_size


def parallel(kind: str, rank: int, ranks: int, *sizes: Any, **settings: Any) -> Any:
    """A linear of SGLang's on one of several ranks."""
    from sglang.srt.layers import linear

    settings |= {"bias": False, "params_dtype": torch.bfloat16}
    if not hasattr(linear, "_resolve_linear_group"):
        return getattr(linear, kind)(*sizes, tp_rank=rank, tp_size=ranks, **settings)
    with pytest.MonkeyPatch.context() as patch:
        group = SimpleNamespace(rank_in_group=rank, world_size=ranks)
        patch.setattr(linear, "_resolve_linear_group", lambda _: group)
        return getattr(linear, kind)(*sizes, **settings)


def mlp(config: Any, weights: dict[str, Any], rank: int, ranks: int, inner: int) -> list[Any]:
    """Gate and up, and down, of one rank, loaded by SGLang's own loaders."""
    columns = parallel("MergedColumnParallelLinear", rank, ranks, HIDDEN, [inner] * 2, quant_config=config, prefix="up")
    row = parallel("RowParallelLinear", rank, ranks, inner, HIDDEN, quant_config=config, prefix="model.down_proj")
    for layer, name, shard in ((columns, "gate", [0]), (columns, "up", [1]), (row, "down", [])):
        for parameter, tensor in zip((layer.weight, layer.weight_scale), weights[name], strict=True):
            parameter.weight_loader(parameter, tensor, *shard)
    for layer in (columns, row):
        layer.quant_method.process_weights_after_loading(layer)
    return [columns, row]


@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
@pytest.mark.parametrize(("inner", "ranks"), [(1424, 1), (1424, 3), (1420, 2)])
def test_a_padded_size_gives_the_bits_of_the_dense_layers_and_of_the_integers(
    stock: Any, monkeypatch: pytest.MonkeyPatch, pattern: str, inner: int, ranks: int
) -> None:
    from sglang.srt.layers import linear, parameter

    monkeypatch.setattr(linear, "_is_cpu", True)
    monkeypatch.setattr(parameter, "_is_cpu", True)
    padded = padded_size(inner, ranks)
    assert padded > inner

    def random(out: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.randn(out, columns)
        return quantize_weight(weight * ss.prune_mask(weight, pattern), torch.int8)

    weights = {"gate": random(inner, HIDDEN), "up": random(inner, HIDDEN), "down": random(HIDDEN, inner)}
    x = rows(HIDDEN).bfloat16()
    for rank in range(ranks):
        sparse = mlp(config_of(pattern), weights, rank, ranks, padded)
        dense = mlp(config_of(None, None), weights, rank, ranks, padded)
        assert [hasattr(layer, "slide") for layer in sparse + dense] == [True, True, False, False]
        found = []
        for columns, row in (sparse, dense):
            gate, up = columns.quant_method.apply(columns, x).chunk(2, -1)
            middle = torch.nn.functional.silu(gate) * up
            found.append((middle, row.quant_method.apply(row, middle)))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])
        first, last = rank * padded // ranks, min((rank + 1) * padded // ranks, inner)
        values, scale = weights["down"]
        own = found[0][0][:, : last - first]  # of the columns that the checkpoint has
        assert torch.equal(found[0][1], oracle(own.contiguous(), values[:, first:last], scale))
