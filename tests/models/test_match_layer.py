"""A matched layer gives outputs nearer to the dense layer's, and keeps its zeros."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from checkpoints import add_tokenizer, make_source
from correlated_linears import correlated_inputs
from small_models import make
from torch import nn

from slidesparse.base.rank_tensors import RankTensors
from slidesparse.base.ranks import ALONE, Ranks
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.errors import InputError
from slidesparse.models import layerwise
from slidesparse.models.hooks import hooked
from slidesparse.models.layer_stack import Sample, find_layer_list, record_inputs
from slidesparse.models.layerwise import PruneLayer, prune_layers
from slidesparse.models.match_layer import Example, Matching, match_layer
from slidesparse.models.shared_layers import SharedLayers
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.prune import PruneOptions, prune_checkpoint
from slidesparse.pruning import get_pruner
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.support import check_pattern

COLUMNS = 32


class Layer(nn.Module):
    """Two linears and what is between them; like transformers' layers it may return a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(COLUMNS, 64), nn.LayerNorm(64), nn.Linear(64, COLUMNS)

    def forward(self, hidden: torch.Tensor, scale: float, *, shift: float) -> tuple[torch.Tensor, None]:
        return hidden + scale * self.down(torch.relu(self.norm(self.up(hidden)))) + shift, None


FREE = {"up.weight": torch.float32, "down.weight": torch.float32}
ARGUMENTS: tuple[tuple[Any, ...], dict[str, Any]] = ((0.5,), {"shift": 1.0})


def pruned_layer(dtype: torch.dtype = torch.float32) -> tuple[Layer, list[Example]]:
    """A layer whose weights lack every third number, and examples of what it gave before."""
    torch.manual_seed(0)
    layer = Layer().to(dtype)
    inputs = correlated_inputs(96, COLUMNS).to(dtype).split(24)
    examples = [Example(x, ARGUMENTS, layer(x, 0.5, shift=1.0)[0].detach()) for x in inputs]
    for name in FREE:
        layer.get_parameter(name).data.view(-1)[::3] = 0
    return layer, examples


@torch.no_grad()
def error(layer: Layer, examples: list[Example]) -> float:
    return sum(float((layer(x.hidden, 0.5, shift=1.0)[0] - x.wanted).square().sum()) for x in examples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_come_nearer_and_zeros_stay(dtype: torch.dtype) -> None:
    layer, examples = pruned_layer(dtype)
    before, state = error(layer, examples), {name: value.clone() for name, value in layer.state_dict().items()}
    found = match_layer(layer, dict.fromkeys(FREE, dtype), examples, Matching(60))
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items()), "the layer changed"
    assert set(found) == set(FREE)
    for name, value in found.items():
        assert value.dtype == dtype
        assert torch.equal(value == 0, state[name] == 0)
        layer.get_parameter(name).data.copy_(value)
    assert error(layer, examples) < 0.7 * before


def test_gradients_of_many_outputs_do_not_vanish_in_fp16() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(COLUMNS, 64, bias=False).to(torch.float16)
    layer.weight.data *= 300  # as of a layer deep in a large model: the mean of squares is far above 1
    inputs = correlated_inputs(4096, COLUMNS).to(torch.float16).split(1024)
    with torch.no_grad():
        examples = [Example(x, ((), {}), layer(x)) for x in inputs]
        layer.weight.view(-1)[::2] = 0
    before = layer.weight.detach().clone()
    found = match_layer(layer, {"weight": torch.float16}, examples, Matching(10))["weight"]
    assert ((found != before) == (before != 0)).float().mean() > 0.9  # nearly every kept weight moved


def test_the_seed_decides_the_bits() -> None:
    layer, examples = pruned_layer()
    first, again, other = (match_layer(layer, FREE, examples, Matching(9, seed)) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in FREE)
    assert not all(torch.equal(first[name], other[name]) for name in FREE)


def test_a_layer_that_comes_no_nearer_keeps_its_bits() -> None:
    layer, examples = pruned_layer()
    exact = [Example(x.hidden, x.arguments, layer(x.hidden, 0.5, shift=1.0)[0].detach()) for x in examples]
    found = match_layer(layer, FREE, exact, Matching(20))
    assert all(torch.equal(found[name], layer.get_parameter(name)) for name in FREE)
    examples[0].wanted[0, 0] = torch.nan
    found = match_layer(layer, FREE, examples, Matching(20))
    assert all(torch.equal(found[name], layer.get_parameter(name)) for name in FREE)


def alone_on(samples: list[Sample]) -> PruneLayer:
    return SharedLayers(RankTensors(ALONE, torch.device("cpu")), len(samples)).prune_layer


@pytest.mark.parametrize("largest", [1.0, 40000.0])
def test_hidden_states_beyond_half_of_the_range_of_fp16_are_matched(largest: float) -> None:
    """Large models have such a channel at the first token; what a layer shall give was Inf there, and none moved."""

    def pruned(matching: Matching | None) -> torch.Tensor:
        model = nn.Module()
        torch.manual_seed(0)
        model.layers = nn.ModuleList([Layer().to(torch.float16)])
        hidden = correlated_inputs(64, COLUMNS).to(torch.float16)
        hidden[::16, 3] = largest
        samples = [Sample(x, [ARGUMENTS]) for x in hidden.split(16)]
        sets, pattern = [["layers.0.down"]], Pattern.parse("2:4")
        layer_list = find_layer_list(model, sets[0])
        given = (model, layer_list, sets, {"layers.0.down": pattern}, get_pruner("sparsegpt"), samples)
        assert len(list(prune_layers(*given, alone_on(samples), matching=matching))) == 1
        weight: torch.Tensor = model.get_parameter("layers.0.down.weight")
        return weight

    first, matched = pruned(None), pruned(Matching(30))
    assert float((first != matched).float().mean()) > 0.2


def options(folder: Path, match: int, **changes: Any) -> PruneOptions:
    text = Calibration(str(folder / "text.txt"), 64, 32)
    defaults: dict[str, Any] = {"method": "sparsegpt", "calibration": text, "match_steps": match}
    return PruneOptions("4:6", "fp32", **{**defaults, **changes})


def test_a_checkpoint(tmp_path: Path) -> None:
    source = make_source(tmp_path, "llama", torch.float32)
    for name, match in (("s", 0), ("matched", 40)):
        summary = prune_checkpoint(source, tmp_path / name, options(tmp_path, match))
    plain, matched = (Checkpoint(tmp_path / name) for name in ("s", "matched"))
    for layer in summary.patterns:
        weight = matched.tensor(f"{layer}.weight")
        check_pattern(weight, "4:6", name=layer)
        # The second layer reads other inputs once the first is matched, and may lose other weights.
        assert torch.equal(weight == 0, plain.tensor(f"{layer}.weight") == 0) or ".layers.1." in layer
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(matched.tensor(norm), Checkpoint(source).tensor(norm))
    assert "40 steps of matching a layer" in (tmp_path / "matched/README.md").read_text()
    letters = transformers.AutoTokenizer.from_pretrained(source)((tmp_path / "text.txt").read_text())["input_ids"]
    ids = torch.tensor(letters[:2048]).view(64, 32)
    states = [hidden(path, ids) for path in (source, tmp_path / "s", tmp_path / "matched")]
    assert (states[2] - states[0]).norm() < 0.9 * (states[1] - states[0]).norm()


@torch.no_grad()
def hidden(path: Path, ids: torch.Tensor) -> torch.Tensor:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    states: torch.Tensor = model.model(ids).last_hidden_state
    return states


def test_layers_whose_experts_are_pruned_are_refused_in_one_line(tmp_path: Path) -> None:
    make_source(tmp_path, "llama", torch.float32)
    make(tmp_path / "mixture", ARCHITECTURES["qwen3-moe"], torch.float32)
    add_tokenizer(tmp_path / "mixture")
    with pytest.raises(InputError, match="leave out --match-steps, or leave experts dense with --ignore"):
        prune_checkpoint(tmp_path / "mixture", tmp_path / "s", options(tmp_path, 10))
    assert not list(tmp_path.glob("s*"))
    with pytest.raises(InputError, match="one process; got 2 processes; run without torchrun"):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", options(tmp_path, 10), ranks=Ranks(world=2))
    dense = options(tmp_path, 1, ignore=("re:.*experts",))
    assert prune_checkpoint(tmp_path / "mixture", tmp_path / "s", dense).losses


class Sharing(nn.Module):
    """A layer that hands its input on in a dict, and reads what the first one handed on."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.linear = index, nn.Linear(COLUMNS, COLUMNS, bias=False)

    def forward(self, hidden: torch.Tensor, shared: Any) -> torch.Tensor:
        found = hidden + self.linear(hidden)
        shared[self.index] = (found,)
        return found + shared[0][0]


class SharingStack(nn.Module):
    """Three such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sharing(index) for index in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared: Any = UserDict()
        for layer in self.layers:
            x = layer(x, shared)
        return x


def test_the_dense_layers_read_nothing_of_the_pruned_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3n and 4 have layers that read the keys and values of earlier ones, out of a dict among their arguments."""
    torch.manual_seed(0)
    stack, x = SharingStack(), torch.randn(2, 16, COLUMNS)
    wanted: list[torch.Tensor] = []
    with (
        torch.no_grad(),
        hooked(one.register_forward_hook(lambda *found: wanted.append(found[-1])) for one in stack.layers),
    ):
        stack(x)
    seen, made = [], layerwise._examples

    def see(layer: Any, index: int, samples: Any, dense: Any) -> list[Example]:
        seen.append(dense[0].hidden)
        return made(layer, index, samples, dense)

    monkeypatch.setattr(layerwise, "_examples", see)
    names = [f"layers.{index}.linear" for index in range(3)]
    layers = find_layer_list(stack, names)
    samples, patterns = record_inputs(stack, layers, [{"x": x}]), dict.fromkeys(names, Pattern.parse("2:4"))
    alone, method = [[name] for name in names], get_pruner("wanda")
    steps = prune_layers(stack, layers, alone, patterns, method, samples, alone_on(samples), matching=Matching(2))
    assert len(list(steps)) == 3
    for found, dense in zip(seen, wanted, strict=True):
        assert torch.equal(found, dense)
    with torch.no_grad():  # and the samples have gone through the pruned ones
        torch.testing.assert_close(samples[0].hidden, stack(x))
