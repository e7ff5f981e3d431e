"""Dense eight-bit checkpoints of other tools inside SGLang's real Python: run fused where the user asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import test_sglang_fusing
import torch
from llm_compressor_checkpoint import group, quantised
from test_sglang_fusing import model_of, server_of_models
from test_sglang_plugin import config_of, loaded, oracle, pruned, tokens

from slidesparse.errors import UnsupportedError
from slidesparse.integrations import NAME
from slidesparse.integrations.sglang import METHOD
from slidesparse.weights.pattern import DENSE

assert server_of_models  # a fixture


def asked(config: dict[str, Any]) -> Any:
    """What SGLang's table makes of a ``quantization_config`` where the user gave options of ours."""
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS

    return QUANTIZATION_METHODS[METHOD].from_config(
        config | {"hf_config": SimpleNamespace(**{NAME: {}}), "packed_modules_mapping": {}}
    )


@pytest.mark.usefixtures("server")
def test_a_dense_checkpoint_is_ours_where_the_user_asks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config, (values, scale), x = asked(quantised()), pruned("dense", 32), tokens()
    assert config.marker.pattern == DENSE
    assert config.can_fuse_shared_expert()
    assert any(line.startswith("slidesparse: nothing is sparse") for line in caplog.messages)
    layer = loaded(config, "model.layers.0.mlp.down_proj", values, scale)
    assert torch.equal(layer(x)[0], oracle(x, values, scale))
    assert not hasattr(layer, "weight")
    assert "slidesparse: model.layers.*.mlp.down_proj: dense, as the checkpoint says" in caplog.messages


@pytest.mark.parametrize("settings", [{"fuse": False}, {}])
def test_where_nothing_is_fused_it_is_sglangs(server: Any, settings: dict[str, Any]) -> None:
    from slidesparse.integrations.sglang.config import SGLangConfig

    server.speculative_algorithm = None if settings else "EAGLE3"  # whose draft may have any quantisation
    assert not isinstance(config_of(None, settings), SGLangConfig)


@pytest.mark.usefixtures("server")
def test_what_cannot_run_is_refused() -> None:
    told = f"{NAME} in --json-model-override-args.*got weights with num_bits 4.*SGLang serves the checkpoint as it is"
    with pytest.raises(UnsupportedError, match=told):
        asked(quantised(group({"num_bits": 4})))


@pytest.mark.usefixtures("server_of_models")
def test_a_dense_model_is_fused_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights happen to have zeros: the sparse model, unfused, says what it must answer."""
    given = torch.arange(6)
    expected = model_of("qwen2", monkeypatch, fuse=False)(given)
    monkeypatch.setattr(test_sglang_fusing, "config_of", lambda **_: config_of(None, {}))
    run = model_of("qwen2", monkeypatch, fuse=True)
    assert torch.equal(run(given), expected)
    assert torch.equal(run(given), expected)  # by readers, which the first run found
    modules = dict(run.model.named_modules())
    readers = [name for name, module in modules.items() if module.__dict__.get("_slidesparse_reader") is not None]
    assert len(readers) == 6  # two norms and SiLU of each layer
