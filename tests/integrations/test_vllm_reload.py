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


def started(path: Path) -> tuple[Any, Any, Any, list[int]]:
    """A model and its configuration; what its layers give, and where graphs read them."""
    config = configured(path, quantization="slidesparse")
    model = loaded(config, REFERENCE)
    return model, config, outputs(model), addresses(model)


@pytest.mark.parametrize(("pattern", "dtype"), [("6:8", torch.int8), ("4:6", torch.bfloat16)])
def test_new_weights_are_packed_where_captured_graphs_read_them(
    checkpoints: Any, pattern: str, dtype: torch.dtype
) -> None:
    path = checkpoints(pattern, dtype)
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


def test_a_packed_weight_is_not_written_to_by_itself(checkpoints: Any) -> None:
    path = checkpoints("6:8", torch.bfloat16)
    model = loaded(configured(path, quantization="slidesparse"), REFERENCE)
    name = "model.layers.0.mlp.gate_proj.weight"
    with pytest.raises((AttributeError, KeyError, ValueError)):
        model.load_weights([(name, Checkpoint(path).tensor(name))])
