"""What is seen of the inputs of experts is what their router sent them, whatever class they are of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from small_mixtures import MIXTURES
from small_models import build
from torch import nn

from slidesparse.errors import InputError
from slidesparse.models.expert_weights import ExpertWeight, WatchExperts, calibrated_experts
from slidesparse.models.experts import Experts, experts_of_a_token, find_experts
from slidesparse.models.grams import expert_inputs, in_parts
from slidesparse.pruning import Linears, get_pruner
from slidesparse.weights.pattern import Pattern

TOKENS = 22


def mixture(name: str) -> Any:
    """A small random model, whose weights are large enough to tell experts apart."""
    model = build(ARCHITECTURES[name]).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return model


def routed(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the rows that reach each expert of a module, from the arguments of its forward."""
    hidden, *rest = (*args, *kwargs.values())
    if not rest:  # Llama 4 hands over all tokens for every expert, times a score that is zero for most
        for rows in hidden.reshape(len(module.gate_up_proj), -1, hidden.shape[-1]):
            yield rows[rows.abs().sum(1) > 0]
        return
    (chosen,) = (one for one in rest if not one.is_floating_point())
    for expert in range(len(module.gate_up_proj)):
        yield hidden.reshape(-1, hidden.shape[-1])[(chosen == expert).any(1)]


def inside(module: Any, rows: torch.Tensor, expert: int, transposed: bool) -> torch.Tensor:
    """What the second weight of an expert reads: the definition of its first product and its activation."""
    weight = module.gate_up_proj[expert]
    both = rows @ (weight if transposed else weight.T)
    if hasattr(module, "gate_up_proj_bias"):
        both = both + module.gate_up_proj_bias[expert]
    if hasattr(module, "_apply_gate"):
        return module._apply_gate(both)
    gate, up = both.chunk(2, -1)
    return up * module.act_fn(gate)


@pytest.mark.parametrize("name", MIXTURES)
@torch.no_grad()
def test_every_mixture_is_seen(name: str) -> None:
    model = mixture(name)
    found = find_experts(model)
    layers = {one.layer(leaf) for one in found for leaf in ("gate_up_proj", "down_proj")}
    weights = calibrated_experts(model, layers)
    assert len(weights) == 2 * 4 * len(found)
    called: dict[str, tuple[Any, Any]] = {}

    def note(one: Experts) -> Any:
        return lambda _, args, kwargs: called.update({one.name: (args, kwargs)})

    for one in found:
        model.get_submodule(one.name).register_forward_pre_hook(note(one), with_kwargs=True)
    grams: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}

    def see(key: str, x: torch.Tensor) -> None:
        grams[key] = grams.get(key, 0) + x.T @ x
        counts[key] = counts.get(key, 0) + len(x)

    language = getattr(model, "language_model", None) or getattr(model.model, "language_model", model)
    with WatchExperts(weights, see):
        language(input_ids=torch.randint(3, 96, (2, TOKENS // 2)), use_cache=False)
    for one in found:
        module = model.get_submodule(one.name)
        for expert, rows in enumerate(routed(module, *called[one.name])):
            second = inside(module, rows, expert, bool(one.transposed))
            for leaf, x in (("gate_up_proj", rows), ("down_proj", second)):
                key = f"{one.name}.{leaf}.{expert}"
                assert counts.get(key, 0) == len(x)
                torch.testing.assert_close(grams.get(key, torch.zeros(x.shape[1], x.shape[1])), x.T @ x)
    for layer in layers:
        used = sum(count for key, count in counts.items() if key.rpartition(".")[0] == layer)
        assert used == TOKENS * experts_of_a_token(model.config.get_text_config())
        assert {weights[f"{layer}.{expert}"].reads_inside for expert in range(4)} == {layer.endswith("down_proj")}


# -- what an expert borrows --------------------------------------------------------------------------------------------


def gram_of(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x


def test_an_expert_with_enough_tokens_borrows_nothing() -> None:
    own, others = torch.randn(16, 16), torch.randn(40, 16)
    inputs = expert_inputs("e", gram_of(own), 16, gram_of(others), 40)
    assert torch.equal(inputs.gram, gram_of(own))
    assert (inputs.tokens, inputs.borrowed) == (16, 0)


def test_an_expert_with_few_tokens_borrows_the_mean_of_its_layer() -> None:
    own, layer = torch.randn(5, 16), torch.randn(40, 16)
    inputs = expert_inputs("e", gram_of(own), 5, gram_of(layer), 40)
    # Eleven tokens are missing: as if each token of the layer had come 11 / 40 times.
    expected = gram_of(torch.cat([own, layer * (11 / 40) ** 0.5]))
    torch.testing.assert_close(inputs.gram, expected)
    assert (inputs.tokens, inputs.borrowed) == (5, 11)
    assert int(torch.linalg.matrix_rank(inputs.gram)) == 16


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_inside_of_an_expert_nothing_of_others_is_known_but_how_large_it_is(method: str) -> None:
    energy = torch.tensor([[320.0]])
    inputs = expert_inputs("e", torch.zeros(16, 16), 0, energy, 40)
    torch.testing.assert_close(inputs.gram, torch.eye(16) * (320 / (40 * 16)) * 16)
    weight = torch.randn(8, 16)
    pattern = Pattern.parse("6:8")
    pruned = get_pruner(method).prune(Linears({"e": weight}, pattern, inputs.gram))["e"]
    assert torch.equal(pruned != 0, get_pruner("magnitude").prune(Linears({"e": weight}, pattern))["e"] != 0)


def test_experts_that_nothing_was_seen_of_are_refused() -> None:
    told = r"no input of e was seen, nor of the other experts.*--method magnitude, or .*--ignore"
    with pytest.raises(InputError, match=told) as error:
        expert_inputs("e", torch.zeros(4, 4), 0, torch.zeros(4, 4), 0)
    assert re.search("\n", str(error.value)) is None


def test_gram_matrices_are_in_memory_as_far_as_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Module()
    module.up = nn.Parameter(torch.zeros(5, 3, 16))
    experts = {f"up.{i}": ExpertWeight(module, "up", i, False, "up") for i in range(5)}
    monkeypatch.setattr("slidesparse.models.grams.AT_ONCE", 2 * 4 * 16 * 16)
    sets = [["q", "k"], *([name] for name in experts), ["o"]]
    assert in_parts(sets, experts) == [[["q", "k"], ["o"], ["up.0"], ["up.1"]], [["up.2"], ["up.3"]], [["up.4"]]]
