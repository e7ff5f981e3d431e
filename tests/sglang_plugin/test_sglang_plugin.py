"""The plugin inside SGLang's real Python: its table of methods, its linear layers, its loaders; the engine never runs.

The reference backend multiplies, exactly for INT8, so a layer of SGLang's must give the bits of the formula.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blackwell import act_as_blackwell
from torch.multiprocessing.reductions import StorageWeakRef

import slidesparse as ss
from slidesparse.errors import CheckpointError, InputError, PatternViolation, UnsupportedError
from slidesparse.gemm.reference import apply_scales, product
from slidesparse.integrations import NAME
from slidesparse.integrations.options import ServerOptions
from slidesparse.integrations.sglang import METHOD, TESTED, register
from slidesparse.integrations.sglang.refusals import LOAD_FORMATS, largest_batch, refuse_what_cannot_work
from slidesparse.integrations.warmup import WarmUp
from slidesparse.models.config_keys import MARKER_KEY, quantization_config
from slidesparse.weights.quant import quantize_rows, quantize_weight

pytestmark = pytest.mark.usefixtures("server")

REFERENCE = {"backend": "reference"}


def is_newest() -> bool:
    """Whether this is the release that CI runs: nothing may be missing there."""
    return metadata.version("sglang") == TESTED[-1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"enable_lora": True}, "LoRA adapters on sparse layers"),
        ({"lora_paths": ["a"]}, "LoRA adapters on sparse layers"),
        ({"enable_memory_saver": True}, "memory is released; got .* add --enable-weights-cpu-backup"),
        ({"cpu_offload_gb": 20}, "--cpu-offload-gb with sparse layers; got 20"),
        ({"offload_group_size": 4}, "--offload-group-size with sparse layers; got 4"),
        ({"load_format": "dummy"}, "--load-format dummy with sparse layers; got random weights, which follow no"),
        ({"load_format": "sharded_state"}, "--load-format sharded_state with sparse layers; got tensors as another"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{told}.*SGLANG_PLUGINS=none"):
        refuse_what_cannot_work(SimpleNamespace(**arguments))
    refuse_what_cannot_work(SimpleNamespace(**dict.fromkeys(arguments)))


def test_a_release_that_lacks_something_serves_dense_and_says_so(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS

    monkeypatch.setitem(QUANTIZATION_METHODS, "compressed-tensors", "theirs")
    monkeypatch.setitem(sys.modules, "slidesparse.integrations.sglang.config", None)
    with caplog.at_level("WARNING"):
        register()
    assert QUANTIZATION_METHODS["compressed-tensors"] == "theirs"
    (line,) = caplog.messages
    assert re.fullmatch(r"slidesparse: pruned checkpoints run dense in SGLang [0-9.]+: .*; tested are .* and .*", line)


def test_formats_that_bring_no_checkpoint_are_refused() -> None:
    from sglang.srt.configs.load_config import LoadFormat

    known = {form.value for form in LoadFormat}
    assert known > LOAD_FORMATS.keys()
    for name in known - LOAD_FORMATS.keys():
        refuse_what_cannot_work(SimpleNamespace(load_format=name))


def test_an_address_of_another_engines_tensors_is_refused() -> None:
    """SGLang processes weights there before it has them."""
    with pytest.raises(UnsupportedError, match="--load-format remote with sparse layers"):
        refuse_what_cannot_work(SimpleNamespace(load_format="remote", model_path="redis://host:6379/model"))
    refuse_what_cannot_work(SimpleNamespace(load_format="remote", model_path="s3://bucket/model"))


def test_the_largest_batch_is_a_chunk_or_a_prefill() -> None:
    assert largest_batch(SimpleNamespace(chunked_prefill_size=8192, max_prefill_tokens=16384)) == 8192
    assert largest_batch(SimpleNamespace(chunked_prefill_size=-1, max_prefill_tokens=16384)) == 16384
    assert largest_batch(SimpleNamespace()) == 0


# -- which checkpoints ---------------------------------------------------------------------------------------------


def config_of(
    marker: dict[str, Any] | str | None = "6:8", options: Any = REFERENCE, dtype: torch.dtype = torch.int8
) -> Any:
    """What SGLang's table makes of a checkpoint."""
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS

    if isinstance(marker, str):
        marker = {"version": 1, "pattern": marker, "ignore": ["lm_head"], "layers": {}}
    hf_config = SimpleNamespace(**{MARKER_KEY: marker, NAME: options})
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    given = quantization_config(dtype, ["lm_head"]) | {"hf_config": hf_config, "packed_modules_mapping": fused}
    return QUANTIZATION_METHODS[METHOD].from_config(given)


def test_sglang_finds_the_plugin_by_its_entry_point() -> None:
    from sglang.srt.plugins import GENERAL_PLUGINS_GROUP

    (point,) = metadata.entry_points(group=GENERAL_PLUGINS_GROUP, name="slidesparse") or [None]
    if point is None:
        pytest.skip("slidesparse is on the path without being installed")
    assert point.load() is register


def test_the_marker_decides_whose_configuration_it_is() -> None:
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    from slidesparse.integrations.sglang.config import SGLangConfig

    assert type(config_of(None, None)) is CompressedTensorsConfig
    ours = config_of("4:6")
    assert type(ours) is SGLangConfig
    assert ours.marker.pattern == ss.Pattern(4, 6)
    assert ours.options == ServerOptions("reference")
    assert config_of(options=None).options == ServerOptions()
    assert ours.most == 8192


def test_what_cannot_be_read_or_cannot_work_stops_it(server: Any) -> None:
    with pytest.raises(CheckpointError):
        config_of({"version": 99, "pattern": "6:8", "ignore": [], "layers": {}})
    with pytest.raises(InputError):
        config_of(options={"graphs": "vllm"})
    server.enable_lora = True
    with pytest.raises(UnsupportedError):
        config_of()
    assert not hasattr(config_of(None, None), "marker")  # others go on working


# -- layers --------------------------------------------------------------------------------------------------------


def pruned(pattern: str, out: int = 24, columns: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(out, columns, generator=torch.Generator().manual_seed(0))
    values, scale = quantize_weight(weight * ss.prune_mask(weight, pattern), torch.int8)
    return values, scale.reshape(-1, 1)


def built(config: Any, name: str, values: torch.Tensor, scale: torch.Tensor) -> Any:
    """A replicated layer of SGLang's, loaded by its own loader but not processed."""
    from sglang.srt.layers.linear import ReplicatedLinear

    out, columns = values.shape
    settings = {"bias": False, "quant_config": config, "params_dtype": torch.bfloat16}
    layer = ReplicatedLinear(columns, out, prefix=name, **settings)
    layer.weight.data.copy_(values)
    layer.weight_scale.data.copy_(scale)
    return layer


def loaded(config: Any, name: str, values: torch.Tensor, scale: torch.Tensor) -> Any:
    layer = built(config, name, values, scale)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def oracle(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    lifted, scale_x = quantize_rows(x, torch.int8, "sglang")
    return apply_scales(product(lifted, values), scale_x, scale.flatten(), None, torch.bfloat16)


def tokens(columns: int = 96) -> torch.Tensor:
    return torch.randn(5, columns, generator=torch.Generator().manual_seed(1)).bfloat16()


O_PROJ = "model.layers.0.self_attn.o_proj"


def test_layers_that_stay_sglangs() -> None:
    values, scale = pruned("6:8")
    config = config_of({"version": 1, "pattern": "6:8", "ignore": ["a.q_proj", "a.k_proj", "a.v_proj"], "layers": {}})
    for name in ("model.layers.0.self_attn.kv_b_proj", "a.qkv_proj"):
        layer = loaded(config, name, values, scale)
        assert layer.weight.shape == (96, 24)  # as SGLang's kernel wants it
    dense = loaded(config_of(options={"fuse": False}), O_PROJ, values, scale)  # auto: no GPU
    assert dense.weight.shape == (96, 24)
    assert not hasattr(dense, "slide")


@pytest.mark.usefixtures("server")
def test_on_blackwell_no_int8_layer_is_left_to_sglang_which_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    (values, scale), x = pruned("6:8", 32), tokens()
    config = config_of(options={"fuse": False, "backend": "dense"})
    act_as_blackwell(monkeypatch)
    layer = loaded(config, O_PROJ, values, scale)
    assert layer.slide.choice.backends == ("dense",)
    assert torch.equal(layer(x)[0], oracle(x, values, scale))


def test_nothing_keeps_a_dense_weight_nor_the_block_that_a_packed_one_was_made_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.model_loader.loader import device_loading_context

    from slidesparse.integrations.sglang import scheme

    layer, made, alive = built(config_of(), O_PROJ, *pruned("6:8")), [], []
    dense, pack = StorageWeakRef(layer.weight.untyped_storage()), scheme.SGLangScheme.pack_layer

    def pack_layer(self: Any, loaded: Any) -> Any:
        slide = pack(self, loaded)
        made.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in slide.forms[0].operand)
        return slide

    def give_back(_: torch.device) -> None:
        alive.append([not storage.expired() for storage in (dense, *made)])

    monkeypatch.setattr(scheme.SGLangScheme, "pack_layer", pack_layer)
    monkeypatch.setattr(scheme, "give_blocks_back", give_back)
    with device_loading_context(layer, torch.device("cpu")):
        layer.quant_method.process_weights_after_loading(layer)
    assert alive == [[False, True], [False, False]]
    assert torch.equal(layer(tokens())[0], oracle(tokens(), *pruned("6:8")))


def test_a_weight_that_belies_its_marker_is_an_error() -> None:
    with pytest.raises(PatternViolation, match=f"{O_PROJ} violates 2:4"):
        loaded(config_of("2:4"), O_PROJ, *pruned("6:8"))


def test_quantised_activations_are_refused() -> None:
    layer = loaded(config_of(), O_PROJ, *pruned("6:8"))
    with pytest.raises(UnsupportedError, match=f"activations of {O_PROJ}.*got tuple"):
        layer.quant_method.apply(layer, (tokens(), torch.ones(5, 1)))


def test_weights_are_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of ours ended the server, and by IPC norms and embeddings alone were replaced."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    values, scale = pruned("6:8")
    layer = loaded(config_of(), O_PROJ, values, scale)
    model = torch.nn.Sequential(layer)
    model.load_weights = lambda *_: pytest.fail("weights were loaded")
    none = dict.fromkeys(("model_config", "update_model_fields", "recapture_cuda_graph", "get_model_runner"))
    settings: dict[str, Any] = {"tp_rank": 0, "device": "cpu", "gpu_id": 0, "custom_weight_loaders": {}, **none}
    updater = WeightUpdater(get_model=lambda: model, **settings)
    monkeypatch.setattr(WeightUpdater, "_assert_weight_cache_inactive", lambda *_: None)
    new, told_first = [(f"{O_PROJ}.weight", values)], "weights for a running engine with sparse layers"
    if is_newest():
        updater.begin_weight_update()
    for done, told in (
        updater.load_weights_from_distributed(new)
        if is_newest()
        else updater.update_weights_from_distributed([], [], [], "none"),
        updater.update_weights_from_tensor(new),
        updater.update_weights_from_ipc(None),
        updater.update_weights_from_disk("another", "auto"),
    ):
        assert not done
        assert told == f"{told_first}; got {O_PROJ}, whose dense weight is gone; start SGLang again"
    if is_newest():
        updater.end_weight_update(run_post_load=False)
    assert torch.equal(layer(tokens())[0], oracle(tokens(), values, scale))


def test_weights_are_not_loaded_again_where_no_module_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in SGLang 0.5.17, which replaced norms and embeddings alone, and said that it had done it."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    from slidesparse.integrations.sglang.scheme import ASKED

    monkeypatch.setattr(weight_updater, ASKED, lambda: None)
    loaded(config_of(), O_PROJ, *pruned("6:8"))
    assert getattr(weight_updater, ASKED)().startswith("weights for a running engine with sparse layers; got ")


@pytest.mark.parametrize("group", [None, SimpleNamespace(rank_in_group=1, world_size=3)])
def test_a_shard_of_unknown_place_is_refused(group: Any) -> None:
    values, scale = pruned("6:8", columns=76)
    layer = built(config_of(), O_PROJ, values[:, :38].contiguous(), scale)
    layer.scheme.in_features, layer.tp_group = 76, group
    with pytest.raises(UnsupportedError, match=f"{O_PROJ}: a shard whose place.*38 of 76 columns"):
        layer.quant_method.process_weights_after_loading(layer)


def test_names_follow_sglang() -> None:
    config = config_of({"version": 1, "pattern": "6:8", "ignore": ["lm_head"], "layers": {"a.b": "4:6"}})
    mapper = SimpleNamespace(
        apply_dict=lambda found: found, apply_list=lambda names: [name.replace("a.", "model.a.") for name in names]
    )
    config.apply_weight_name_mapper(mapper)
    assert config.marker.layers == {"model.a.b": ss.Pattern(4, 6)}
    assert config.marker.ignore == ("lm_head",)


def test_a_layer_of_each_kind_runs_before_graphs_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[Any] = []
    monkeypatch.setattr(WarmUp, "layer", lambda self, layer: warmed.append((self.most, self.dtype, layer)))
    layer = built(config_of(), O_PROJ, *pruned("6:8"))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    layer.quant_method.process_weights_after_loading(layer)
    assert warmed == [(8192, torch.bfloat16, layer.slide)]


@pytest.mark.parametrize(("dtype", "sparse"), [(torch.int8, True), (torch.float8_e4m3fn, False)], ids=str)
def test_where_a_batch_must_not_matter_only_exact_products_are_ours(
    server: Any, dtype: torch.dtype, sparse: bool
) -> None:
    from slidesparse.integrations.sglang.scheme import SGLangScheme

    for server.enable_deterministic_inference in (True, False):
        layer = built(config_of(dtype=dtype), "a.down_proj", torch.zeros(24, 96, dtype=dtype), torch.ones(24, 1))
        assert isinstance(layer.scheme, SGLangScheme) is (sparse or not server.enable_deterministic_inference)


def test_servers_that_are_left_alone(server: Any) -> None:
    assert config_of().fuses
    assert not config_of(options={"fuse": False}).fuses
    invariant = "enable_deterministic_inference", "rl_on_policy_target"
    for argument in (*invariant, "enable_dp_attention", "enable_symm_mem", "speculative_algorithm"):
        setattr(server, argument, "on")
        assert not config_of().fuses
        delattr(server, argument)
