"""Weights that vLLM loads again into a model that is there, as ``reload_weights`` and weight transfer do; no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_models import REFERENCE, configured, loaded

import slidesparse as ss
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.errors import UnsupportedError
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.integrations.vllm.reload import pack_again

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")

Change = Callable[[str, torch.Tensor], torch.Tensor]
Weights = Iterator[tuple[str, torch.Tensor]]


def rolled(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Another weight that has the same zeros in every group: its rows in another order."""
    return tensor.roll(1, 0) if "_proj" in name else tensor


def weights(path: Path, change: Change) -> Weights:
    """The tensors of a checkpoint, changed."""
    checkpoint = Checkpoint(path)
    for name in checkpoint.files:
        yield name, change(name, checkpoint.tensor(name))


def reload(model: Any, config: Any, given: Weights) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    model.load_weights(given)
    finalize_layerwise_reload(model, config)


def linears(model: Any) -> dict[str, Any]:
    """The converted layers of a model."""
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "slide")}


def outputs(model: Any) -> dict[str, torch.Tensor]:
    """What each converted layer makes of the same input."""
    made = {}
    for name, layer in linears(model).items():
        x = torch.randn(3, layer.input_size, generator=torch.Generator().manual_seed(0)).bfloat16()
        made[name] = layer(x)[0]
    return made


def addresses(model: Any) -> list[int]:
    """Of everything that a captured graph of a model's layers reads."""
    layers = linears(model).values()
    tensors = [tensor for layer in layers for tensor in (*layer.slide.buffers(), *layer.parameters())]
    return [tensor.data_ptr() for tensor in tensors]


def started(path: Path, options: dict[str, Any] = REFERENCE, **settings: Any) -> tuple[Any, Any, Any, list[int]]:
    """A model and its configuration; what its layers give, and where graphs read them."""
    config = configured(path, **settings)
    model = loaded(config, options)
    return model, config, outputs(model), addresses(model)


@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
def test_new_weights_are_packed_where_captured_graphs_read_them(checkpoints: Any, pattern: str) -> None:
    path = checkpoints(pattern)
    model, config, before, places = started(path)
    assert len(before) == 4
    reload(model, config, weights(path, rolled))
    for name, y in outputs(model).items():
        if "qkv" in name or "gate_up" in name:  # several weights in one, each with its rows rolled
            assert not torch.equal(y, before[name])
        else:
            assert torch.equal(y, before[name].roll(1, 1))
    assert addresses(model) == places
    reload(model, config, weights(path, lambda name, tensor: tensor))
    after = outputs(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert addresses(model) == places
    assert not any(hasattr(layer, "weight") for layer in linears(model).values())


def test_linears_that_stay_dense_take_any_weight(checkpoints: Any) -> None:
    """They are ours where something may be joined with them, and no graph knows of zeros in them."""
    path = checkpoints("6:8")
    model, config, before, places = started(path, {})
    assert {layer.slide.choice.backends for layer in linears(model).values()} == {("dense",)}
    reload(model, config, weights(path, lambda name, tensor: tensor.masked_fill(tensor == 0, 1)))
    assert not any(torch.equal(y, before[name]) for name, y in outputs(model).items())
    assert addresses(model) == places
    reload(model, config, weights(path, lambda name, tensor: tensor))
    assert all(torch.equal(y, before[name]) for name, y in outputs(model).items())


def test_weights_of_a_float_checkpoint_are_loaded_again(checkpoints: Any) -> None:
    path = checkpoints("6:8", torch.bfloat16)
    model, config, before, places = started(path, quantization="slidesparse")
    reload(model, config, weights(path, lambda name, tensor: 2 * tensor if "_proj" in name else tensor))
    after = outputs(model)
    assert all(torch.equal(after[name], 2 * before[name]) for name in before)
    assert addresses(model) == places


def test_what_is_loaded_only_in_part_keeps_its_other_weights(checkpoints: Any) -> None:
    path = checkpoints("6:8")
    model, config, before, places = started(path)
    reload(model, config, ((name, tensor) for name, tensor in weights(path, rolled) if "mlp" in name))
    after = outputs(model)
    assert [name for name in after if not torch.equal(after[name], before[name])] == [
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.down_proj",
    ]
    assert addresses(model) == places


def dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(tensor) if name.endswith("proj.weight") else tensor


def test_weights_that_do_not_fit_are_refused(checkpoints: Any) -> None:
    told = "proj violates 6:8 at row 0, group 0.*needed zeros of 6:8, as when the engine started"
    path = checkpoints("6:8")
    model, config, before, _ = started(path)
    start = r"the weight of model\.layers\.0\.\S+_proj cannot be loaded into the running engine; "
    with pytest.raises(UnsupportedError, match=start + f".*{told}.*start vLLM again") as error:
        reload(model, config, weights(path, dense))
    name = str(error.value).split()[3]
    assert torch.equal(outputs(model)[name], before[name])


def test_a_weight_of_another_size_is_refused() -> None:
    slide = ss.SlideLinear.from_linear(torch.nn.Linear(64, 32), "6:8", method="magnitude")
    layer = SimpleNamespace(weight=torch.zeros(16, 64, dtype=torch.int8), weight_scale=torch.ones(16, 1))
    with pytest.raises(UnsupportedError, match=r"got \[16, 64\]; needed \[32, 64\], as when it started"):
        pack_again(layer, slide, "a")


def test_values_of_eight_bits_are_not_loaded_into_a_layer_of_six(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hopper, "why_not", lambda *_: None)
    linear = torch.nn.Linear(64, 32, bias=False)
    given: Any = {"method": "magnitude", "fallback": "none"}
    slide, eight = (
        ss.SlideLinear.from_linear(linear, "6:8", **given, rounding=rounding) for rounding in ("6bit", "absmax")
    )
    scale = eight.weight_scale
    assert scale is not None
    pruned = linear.weight.detach() * ss.prune_mask(linear.weight.detach(), "6:8")
    values = (pruned / scale[:, None]).round().to(torch.int8)
    layer = SimpleNamespace(weight=torch.nn.Parameter(values, False), weight_scale=torch.nn.Parameter(scale[:, None]))
    told = "got values of more than six bits; needed six, as when the engine started; start vLLM again"
    with pytest.raises(UnsupportedError, match=told):
        pack_again(layer, slide, "a")
    assert slide.choice.backends == ("hopper-6bit",)


def test_compiled_code_reads_new_weights(checkpoints: Any) -> None:
    path = checkpoints("6:8")
    model, config, _, _ = started(path)
    mlp = model.model.layers[0].mlp.down_proj
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: mlp(x)[0], fullgraph=True, backend="aot_eager")
        before = compiled(x)
        reload(model, config, weights(path, rolled))
        assert torch.equal(compiled(x), before.roll(1, 1))


def test_a_packed_weight_is_not_written_to_by_itself(checkpoints: Any) -> None:
    path = checkpoints("6:8", torch.bfloat16)
    model = loaded(configured(path, quantization="slidesparse"), REFERENCE)
    name = "model.layers.0.mlp.gate_proj.weight"
    with pytest.raises((AttributeError, KeyError, ValueError)):
        model.load_weights([(name, Checkpoint(path).tensor(name))])
