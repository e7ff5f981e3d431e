"""The quantisation method ``slidesparse``: vLLM's compressed-tensors, whose W8A8 layers may run on packed weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsScheme,
    CompressedTensorsW8A8Fp8,
    CompressedTensorsW8A8Int8,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from slidesparse.base.log import log_once
from slidesparse.checkpoints.marker import Marker
from slidesparse.errors import UnsupportedError
from slidesparse.integrations import NAME, SPARSE_TENSOR_CORES
from slidesparse.integrations.experts import with_packing
from slidesparse.integrations.names import (
    COMPRESSED_TENSORS,
    LEFT_ALONE,
    NamedLayer,
    find_layer,
    marked_experts,
    rename_layers,
    require_marker,
    require_w8a8,
    why_left,
    why_not_w8a8,
)
from slidesparse.integrations.vllm import LOGGER
from slidesparse.integrations.vllm.experts import METHODS, PackingMethod, why_experts_left
from slidesparse.integrations.vllm.graph_pass import install_pass
from slidesparse.integrations.vllm.graph_sizes import cut_less_between_graphs
from slidesparse.integrations.vllm.model_state import ModelState
from slidesparse.integrations.vllm.private import add_stack_room
from slidesparse.integrations.vllm.refused import SERVE_DENSE, SERVE_FLOATS_DENSE, require_supported
from slidesparse.integrations.vllm.releases import describe_tested, is_newer, is_older
from slidesparse.integrations.vllm.scheme import SlideScheme, SlideUnquantizedMethod, note_when_loaded
from slidesparse.integrations.vllm.status import Outcome
from slidesparse.models.config_keys import MARKER_KEY

log = logging.getLogger(LOGGER)

UNQUANTISED: Mapping[str, Any] = {"target_scheme_map": {}, "ignore": [], "quant_format": ""}
"""Arguments of vLLM's configuration for a checkpoint that is not quantised."""

DRAFT = "draft_model."
"""Prefix of a draft model's layers in vLLM, which its checkpoint lacks."""

W8A8 = CompressedTensorsW8A8Int8, CompressedTensorsW8A8Fp8
"""vLLM's schemes that ours can replace."""

FLOAT_HEAD = "left to vLLM, since an output embedding runs sparse in INT8 and FP8 only"


class SlideSparseConfig(CompressedTensorsConfig):
    """The quantisation method of one model; vLLM passes no arguments for a checkpoint that is not quantised.

    Its ``get_name`` is that of compressed-tensors: vLLM's models check it where that method can do more than others,
    such as Gemma 4 before it loads a quantised vision tower whose sizes are no multiples of 64.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.quantised = bool(args or kwargs)
        self.serve_dense = SERVE_DENSE if self.quantised else SERVE_FLOATS_DENSE
        require_platform(self.serve_dense)
        super().__init__(*args, **(kwargs if self.quantised else UNQUANTISED))
        self.marker: Marker | None = None
        self._model: ModelState | None = None

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least compute capability, times ten."""
        return SPARSE_TENSOR_CORES

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None, **_: Any
    ) -> str | None:
        """Return our name for a checkpoint of ours; vLLM calls this before it loads anything, so errors come early."""
        marker = getattr(hf_config, MARKER_KEY, None)
        if user_quant == NAME and marker is None:
            require_w8a8(hf_quant_cfg, f"--quantization {NAME}", "leave the option out: vLLM serves it as it is")
        ours = user_quant == NAME or (user_quant is None and marker is not None)
        if not ours or hf_quant_cfg.get("quant_method") != COMPRESSED_TENSORS:
            return None
        require_marker(hf_config)
        require_platform()
        return NAME

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read the marker, which is outside of ``quantization_config``."""
        self.marker = require_marker(hf_config)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the marker's layers and experts, as vLLM renames its own."""
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        if self.marker is not None:
            self.marker = rename_layers(self.marker, hf_to_vllm_mapper.apply_list)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method that loads and multiplies a layer."""
        prefix = prefix.removeprefix(DRAFT)  # which the names of the marker and the ignore list lack
        if self.quantised:
            method = super().get_quant_method(layer, prefix)
            return self._with_experts(method, layer, prefix)
        if not isinstance(layer, LinearBase):
            self._note_other_experts(prefix)
            self._note_float_head(layer, prefix)
            return None
        model = self.prepare_model()
        named = self._find_layer(layer, prefix, model)
        return UnquantizedLinearMethod() if named is None else SlideUnquantizedMethod(named, model)

    def get_scheme(
        self, layer: torch.nn.Module, layer_name: str | None = None, **kwargs: Any
    ) -> CompressedTensorsScheme | None:
        """Return vLLM's scheme for a layer, wrapped where we can run it."""
        scheme = super().get_scheme(layer, layer_name, **kwargs)
        if scheme is None or layer_name is None:
            return scheme
        model, refusal = self.prepare_model(), why_not_w8a8(scheme, W8A8)
        if refusal is not None:
            note_when_loaded(scheme, layer, layer_name, refusal, model)
            return scheme
        named = self._find_layer(layer, layer_name, model)
        return scheme if named is None else SlideScheme(scheme, named, model)

    def _with_experts(
        self, method: QuantizeMethodBase | None, layer: torch.nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        """Return vLLM's method for experts, or one that packs them where we can run them."""
        if type(method).__name__ not in METHODS:
            self._note_other_experts(prefix)
            return method
        model = self.prepare_model()
        reason = why_experts_left(method, self, model.options.experts)
        named = None if reason else marked_experts(self.marker, prefix)
        if named is None:
            text = f"experts: {reason or LEFT_ALONE}"
            model.status.outcomes[prefix] = Outcome(False, reason is not None, text)
            return method
        model.status.expect_layer(prefix, layer)
        packing: QuantizeMethodBase = with_packing(PackingMethod, method, named, model)
        return packing

    def _note_other_experts(self, prefix: str) -> None:
        """Note that pruned experts stay dense which vLLM loads in a float type."""
        if self.marker is not None and marked_experts(self.marker, prefix) is not None:
            why = "experts: their weights are neither INT8 nor FP8"
            self.prepare_model().status.outcomes[prefix] = Outcome(False, True, why)

    def _note_float_head(self, layer: torch.nn.Module, prefix: str) -> None:
        if self.marker is not None and isinstance(layer, ParallelLMHead) and find_layer(self.marker, prefix, {}):
            self.prepare_model().status.outcomes[prefix] = Outcome(False, True, FLOAT_HEAD)

    def prepare_model(self) -> ModelState:
        """Return the state of the model that is being built; on the first call, prepare the engine for it.

        vLLM creates this object before its own configuration is complete, and calls it next for the first layer. Then
        vLLM's compilation gets our graph pass, attention between larger graphs is not split for their sake, and busy
        loops get room on Python's stack, once a process.

        Raises:
            InputError: An unknown option.
            UnsupportedError: Sparse layers do not support an option of vLLM's.
        """
        if self._model is None:
            vllm_config: Any = get_current_vllm_config()
            require_supported(vllm_config, self.serve_dense)
            self._model = ModelState.create(vllm_config)
            install_pass(vllm_config.compilation_config, self._model)
            cut_less_between_graphs()
            add_stack_room()
        return self._model

    def _find_layer(self, layer: torch.nn.Module, name: str, model: ModelState) -> NamedLayer | None:
        reason = why_left(name)
        named = None if reason else find_layer(self.marker, name, self.packed_modules_mapping)
        if named is None:
            model.status.outcomes[name] = Outcome(False, False, reason or LEFT_ALONE)
            return None
        model.status.expect_layer(name, layer)
        return named


def require_platform(serve_dense: str = SERVE_DENSE) -> None:
    """Raise an UnsupportedError for an unsuitable vLLM or GPU, and warn of an untested vLLM."""
    text = metadata.version("vllm")
    if is_older(text):
        raise UnsupportedError(
            "slidesparse with this vLLM", got=text, needed=describe_tested(), remedy='pip install -U "vllm"'
        )
    if is_newer(text):
        log_once(f"slidesparse was tested with vLLM {describe_tested()}; this is {text}", logging.WARNING, log)
    capability = current_platform.get_device_capability()
    if capability is None:
        return
    if not current_platform.is_cuda() or capability.to_int() < SPARSE_TENSOR_CORES:
        raise UnsupportedError(
            "slidesparse on this GPU",
            got=f"{current_platform.get_device_name()}, compute capability {capability.as_version_str()}",
            needed="an NVIDIA GPU with Sparse Tensor Cores, compute capability 8.0 or newer",
            remedy=serve_dense,
        )
