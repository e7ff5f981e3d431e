"""Calibrated pruning, from a checkpoint and a text to a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from checkpoints import (
    SMALL,
    add_tokenizer,
    by_magnitude,
    contents,
    make_checkpoint,
    make_source,
    make_w8a8,
    read_text,
    write_text,
)
from oracles import calibration_gram
from small_models import build, make
from test_architectures import skip_if_unknown
from torch import nn

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.errors import CheckpointError, InputError
from slidesparse.models.hooks import hooked
from slidesparse.models.layer_stack import LayerList, find_layer_list, record_inputs, run_layer
from slidesparse.models.targets import find_targets, input_sets
from slidesparse.offline.calibrate.calibration import Calibration, encode, load_tokenizer, sample_windows
from slidesparse.offline.prune import PruneOptions, prune_checkpoint
from slidesparse.pruning import Linears, get_pruner
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.support import check_pattern

LENGTH, SAMPLES = 32, 12


def calibration(folder: Path, **changes: Any) -> Calibration:
    return replace(Calibration(str(folder / "text.txt"), SAMPLES, LENGTH), **changes)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path, "llama", torch.float32)


# -- what comes out ------------------------------------------------------------------------------------------------


def by_definition(folder: Path, windows: torch.Tensor, pattern: Pattern, method: str) -> dict[str, torch.Tensor]:
    """Layer after layer, on a whole model in memory: collect what every linear reads, prune, go on."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    linears = find_targets(model).linears
    pruned = {}
    for i in range(model.config.num_hidden_layers):
        here = {name: linear for name, linear in linears.items() if name.startswith(f"model.layers.{i}.")}
        read: dict[str, list[torch.Tensor]] = {name: [] for name in here}
        handles = [
            linear.register_forward_pre_hook(lambda _, args, read=read, name=name: read[name].append(args[0]))
            for name, linear in here.items()
        ]
        with torch.no_grad():
            model(windows)
        for handle in handles:
            handle.remove()
        for names in input_sets(model, here, lambda: model(windows[:1])):
            gram = calibration_gram(torch.cat(read[names[0]]))
            weights = {name: here[name].weight.detach().clone() for name in names}
            pruned |= get_pruner(method).prune(Linears(weights, pattern, gram))
        for name, linear in here.items():
            linear.weight.data.copy_(pruned[name])
    return pruned


@pytest.mark.parametrize(
    ("family", "method", "pattern"),
    [
        ("llama", "wanda", "6:8"),
        ("llama", "sparsegpt", "4:6"),
        ("qwen2", "sparsegpt", "4:6"),
        ("qwen3", "sparsegpt", "6:8"),
        ("mistral", "sparsegpt", "6:8"),  # its layers get a mask: attention reaches back 8 tokens of 32
    ],
)
def test_against_a_whole_model_in_memory(tmp_path: Path, family: str, method: str, pattern: str) -> None:
    source = tmp_path / "m"
    make_checkpoint(source, family, torch.float32)
    add_tokenizer(source)
    write_text(tmp_path / "text.txt")
    text = encode(load_tokenizer(source), read_text(source.parent / "text.txt"))
    windows = sample_windows(text, SAMPLES, LENGTH, 0)
    options = PruneOptions(pattern, "fp32", method, calibration(source.parent))
    prune_checkpoint(source, source.parent / "s", options)
    out = Checkpoint(source.parent / "s")
    for name, expected in by_definition(source, windows, Pattern.parse(pattern), method).items():
        got = out.tensor(f"{name}.weight")
        # Sums of other order in float32; a tie broken otherwise would show as a whole weight.
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
        assert torch.equal(got == 0, expected == 0)


def test_a_quantised_source_is_calibrated_too(source: Path) -> None:
    make_w8a8(source, source.parent / "q")
    prune_checkpoint(
        source.parent / "q", source.parent / "s", PruneOptions("6:8", None, "wanda", calibration(source.parent))
    )
    before, after = Checkpoint(source.parent / "q"), Checkpoint(source.parent / "s")
    name = "model.layers.1.mlp.up_proj.weight"
    kept = after.tensor(name) != 0
    assert torch.equal(after.tensor(name)[kept], before.tensor(name)[kept])
    check_pattern(after.tensor(name), "6:8")


# -- when things go wrong ------------------------------------------------------------------------------------------


def refuse(source: Path, says: str, options: PruneOptions) -> None:
    before = contents(source)
    with pytest.raises((InputError, CheckpointError), match=says):
        prune_checkpoint(source, source.parent / "s", options)
    assert contents(source) == before
    assert not (source.parent / "s").exists()
    assert not (source.parent / "s.partial").exists()


def test_windows_that_are_longer_than_any_text(source: Path) -> None:
    text = calibration(source.parent, length=9_000_000)
    refuse(source, "got 9000000 tokens; needed at most", PruneOptions("6:8", "int8", "wanda", text))


def test_windows_are_taken_once_each() -> None:
    taken = sample_windows(torch.arange(100), 10, 10, seed=4)
    assert sorted(taken.flatten().tolist()) == list(range(100))
    assert not torch.equal(taken, sample_windows(torch.arange(100), 10, 10, seed=5))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "no tokenizer that can be loaded"),
        (
            lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],  # transformers would list all others
            r"no tokenizer that can be loaded; got no file of one; needed tokenizer\.json .*; copy",
        ),
        (lambda folder: make_checkpoint(folder, vocab_size=40), "does not fit its model"),
    ],
    ids=["empty", "none", "of another model"],
)
def test_unusable_tokenizers(tmp_path: Path, spoil: Callable[[Path], object], says: str) -> None:
    make_checkpoint(tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    write_text(tmp_path / "text.txt")
    kept = (tmp_path / "m/tokenizer.json").read_text()
    spoil(tmp_path / "m")
    if "fit" in says:
        (tmp_path / "m/tokenizer.json").write_text(kept)
    refuse(tmp_path / "m", says, PruneOptions("6:8", "int8", "wanda", calibration(tmp_path)))


def test_a_tokenizer_whose_regular_expression_never_ends(tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    said = json.loads((tmp_path / "tokenizer.json").read_text())
    said["pre_tokenizer"]["pattern"] = {"Regex": "(a+)+$"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="the tokenizer cannot read the text; got PanicException"):
        encode(load_tokenizer(tmp_path), "a" * 100 + "!")


def test_a_model_that_cannot_be_tried_is_refused_with_what_works(tmp_path: Path) -> None:
    """A classifier without a padding token takes no batch, so no run tells which linears read one input."""
    config = transformers.Qwen2Config(**{**SMALL, "pad_token_id": None})
    transformers.Qwen2ForSequenceClassification(config).save_pretrained(tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    write_text(tmp_path / "text.txt")
    options = PruneOptions("6:8", "int8", "wanda", calibration(tmp_path))
    refuse(tmp_path / "m", r"cannot run Qwen2ForSequenceClassification .*--method magnitude", options)
    prune_checkpoint(tmp_path / "m", tmp_path / "made", by_magnitude("6:8", "int8"))


def test_models_that_cannot_be_walked() -> None:
    class Odd(nn.Module):
        def __init__(self, calls: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
            self.calls = calls

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[: self.calls]:
                x = layer(x)
            return x

    with pytest.raises(InputError, match="cannot calibrate Linear layer by layer"):
        find_layer_list(nn.Linear(4, 4), ["x"])
    odd = Odd(2)
    with pytest.raises(InputError, match="does not run layers one after the other"):
        record_inputs(odd, find_layer_list(odd, ["layers.0", "layers.2"]), [{"x": torch.ones(1, 32)}])


def make_stack(name: str, **changes: Any) -> tuple[Any, LayerList]:
    """A random model of an architecture in memory, and its layers."""
    found = ARCHITECTURES[name]
    skip_if_unknown(found)
    model = build(found, **changes).float().eval()
    linears = list(find_targets(model).linears)
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    most = max(lists, key=lambda outer: sum(name.startswith(f"{outer}.") for name in linears))
    return model, find_layer_list(model, [name for name in linears if name.startswith(f"{most}.")])


@pytest.mark.parametrize(("name", "windows"), [("t5", 2), ("t5-encoder", 3), ("rwkv", 1)])
def test_a_stack_that_takes_a_hidden_state_apart_is_refused(name: str, windows: int) -> None:
    """Its layers give several things; a batch with as many windows would pass for these."""
    model, layers = make_stack(name)
    ids = torch.randint(3, 90, (windows, 32), generator=torch.Generator().manual_seed(0))
    told = f"cannot calibrate {type(model).__name__} layer by layer; got ValueError: .*; use --method magnitude"
    with pytest.raises(InputError, match=told):
        record_inputs(model, layers, [{"input_ids": ids, "use_cache": False}])


INDEXERS = {
    "num_hidden_layers": 5,
    "indexer_types": ["full", "shared", "full", "shared", "shared"],
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"],
}


@pytest.mark.parametrize("windows", [1, 2])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("glm-5", INDEXERS),
        ("hy-v4", INDEXERS),
        ("mpt", {"n_layers": 6}),
        ("falcon", {"num_hidden_layers": 6}),
        ("xlnet", {"n_layer": 6}),
        ("deberta-v2", {"num_hidden_layers": 6}),
        ("bamba", {"num_hidden_layers": 6}),
    ],
)
def test_stacks_whose_layers_give_a_tuple(name: str, changes: dict[str, Any], windows: int) -> None:
    """GLM-5's and HYV4's later layers read the second thing too; the others drop it."""
    require_same_states(*make_stack(name, **changes), windows=windows)


@pytest.mark.parametrize("windows", [1, 2])
def test_a_stack_that_mixes_something_into_the_hidden_state_is_refused(windows: int) -> None:
    """This DeBERTa adds a convolution to what its first layer gives, and took two windows for two things."""
    model, layers = make_stack("deberta-v2", conv_kernel_size=3, conv_act="gelu")
    with pytest.raises(InputError, match="cannot calibrate DebertaV2ForMaskedLM layer by layer"):
        record_inputs(model, layers, [{"input_ids": torch.full((windows, 32), 5)}])


def require_same_states(model: Any, layers: LayerList, windows: int) -> None:
    """Each layer alone gives what it gives in the whole model."""
    ids = torch.randint(3, 90, (windows, 32), generator=torch.Generator().manual_seed(0))
    wanted: list[torch.Tensor] = []

    def see(_: nn.Module, __: Any, out: Any) -> None:
        wanted.append(out[0] if isinstance(out, tuple) else out)

    with torch.no_grad(), hooked(layer.register_forward_hook(see) for layer in layers.layers):
        model(ids, use_cache=False)
    [sample] = record_inputs(model, layers, [{"input_ids": ids, "use_cache": False}])
    with torch.no_grad():
        for index, layer in enumerate(layers.layers):
            sample.hidden = run_layer(layer, sample, index)
            torch.testing.assert_close(sample.hidden, wanted[index])


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_a_layer_that_runs_several_times_is_not_calibrated_on_one_of_them(tmp_path: Path, method: str) -> None:
    """ALBERT has one layer, which each of its passes calls."""
    make(tmp_path / "m", ARCHITECTURES["albert"], torch.float32, num_hidden_layers=3)
    add_tokenizer(tmp_path / "m")
    write_text(tmp_path / "text.txt")
    outside = ("re:.*mapping_in", "re:predictions.*")
    options = PruneOptions("6:8", "int8", method, calibration(tmp_path), ignore=outside)
    told = (
        "cannot calibrate AlbertForMaskedLM layer by layer; got albert.encoder.albert_layer_groups.0, "
        "which runs 3 times; needed layers that run once in a forward pass; use --method magnitude"
    )
    refuse(tmp_path / "m", re.escape(told), options)
    refuse(tmp_path / "m", re.escape(told), replace(options, match_steps=2))
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", replace(options, method="magnitude", calibration=None))
    assert summary.patterns
