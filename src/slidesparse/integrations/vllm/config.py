"""The quantisation method ``slidesparse``: vLLM's compressed-tensors, whose W8A8 layers may run on packed weights."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
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
from vllm.platforms import current_platform

from slidesparse.errors import UnsupportedError
from slidesparse.files.marker import KEY, Marker
from slidesparse.integrations.vllm import LOGGER, NAME, NEWEST, OLDEST, parse_version, version_text
from slidesparse.integrations.vllm.fuse_norms import install
from slidesparse.integrations.vllm.names import Claim, Options, claim, claims, left_to_vllm, renamed, require_marker
from slidesparse.integrations.vllm.reload import refuse_reloading
from slidesparse.integrations.vllm.scheme import LEAST_CAPABILITY, SlideScheme, SlideUnquantizedMethod
from slidesparse.integrations.vllm.stack_room import give_room
from slidesparse.integrations.vllm.status import Ledger, Outcome
from slidesparse.integrations.vllm.warmup import Rehearsal

log = logging.getLogger(LOGGER)

NOTHING = {"target_scheme_map": {}, "ignore": [], "quant_format": ""} | {
    "sparsity_scheme_map": {},  # up to vLLM 0.20
    "sparsity_ignore_list": [],
}
"""Arguments of vLLM's configuration for a checkpoint in which it has nothing to do."""

SERVE_DENSE = "serve it dense with --quantization compressed-tensors"


class SlideSparseConfig(CompressedTensorsConfig):
    """vLLM makes one for each model; without arguments, for a checkpoint that is not quantised."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.quantised = bool(args or kwargs)
        if not self.quantised:
            known = inspect.signature(CompressedTensorsConfig.__init__).parameters
            kwargs = {name: empty for name, empty in NOTHING.items() if name in known}
        super().__init__(*args, **kwargs)
        self.marker: Marker | None = None
        self.ledger = Ledger()

    def get_name(self) -> str:
        """The method's name."""
        return NAME

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability, times ten."""
        return LEAST_CAPABILITY

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None, **_: Any
    ) -> str | None:
        """Claim a checkpoint: vLLM asks before it loads anything, so this is where to refuse early.

        Raises:
            CheckpointError: A marker that cannot be read.
            UnsupportedError: A GPU without Sparse Tensor Cores, or too old a vLLM.
        """
        if not claims(hf_quant_cfg, user_quant, getattr(hf_config, KEY, None)):
            return None
        require_marker(hf_config)
        require_platform()
        return NAME

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Take the marker, which stands outside of ``quantization_config``."""
        require_platform()
        self.marker = require_marker(hf_config)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the layers that the marker names, as vLLM renames its own."""
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        if self.marker is not None:
            names = [*self.marker.ignore, *self.marker.layers]
            mapped = {name: new for name in names for new in hf_to_vllm_mapper.apply_list([name])}
            self.marker = renamed(self.marker, mapped)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """How a layer is loaded and multiplied."""
        if self.quantised:
            return super().get_quant_method(layer, prefix)
        if not isinstance(layer, LinearBase):
            return None
        ours = self._claim(layer, prefix)
        return UnquantizedLinearMethod() if ours is None else SlideUnquantizedMethod(ours, *self._context())

    def get_scheme(
        self, layer: torch.nn.Module, layer_name: str | None = None, **kwargs: Any
    ) -> CompressedTensorsScheme | None:
        """The scheme that vLLM has for a layer, wrapped where it is one that we can run."""
        scheme = super().get_scheme(layer, layer_name, **kwargs)
        if scheme is None or layer_name is None:
            return scheme
        refusal = why_not(scheme)
        if refusal is not None:
            self.ledger.outcomes[layer_name] = Outcome(False, False, refusal)
            return scheme
        ours = self._claim(layer, layer_name)
        return scheme if ours is None else SlideScheme(scheme, ours, *self._context())

    def _context(self) -> tuple[Options, Ledger]:
        """What all layers of the model that is being built share."""
        config = get_current_vllm_config()
        options = Options.parse(config.additional_config)
        if config.model_config is None or config.model_config.enforce_eager:
            options = replace(options, fuse=False)  # nothing is compiled, so nothing can be joined
        install(config.compilation_config, self.ledger, options.fuse)
        give_room()
        refuse_reloading()
        if self.ledger.rehearsal is None and config.model_config is not None:
            most = config.scheduler_config.max_num_batched_tokens
            self.ledger.rehearsal = Rehearsal(most, config.model_config.dtype)
        return options, self.ledger

    def _claim(self, layer: torch.nn.Module, name: str) -> Claim | None:
        why_left = left_to_vllm(name)
        ours = None if why_left else claim(self.marker, name, self.packed_modules_mapping)
        if ours is None:
            self.ledger.outcomes[name] = Outcome(False, False, why_left or "left alone when the checkpoint was pruned")
        else:
            self.ledger.expect(name, layer)
        return ours


def why_not(scheme: CompressedTensorsScheme) -> str | None:
    """Why a scheme of vLLM's is not one that we can run, or None."""
    if not isinstance(scheme, (CompressedTensorsW8A8Int8, CompressedTensorsW8A8Fp8)):
        return f"{type(scheme).__name__} is neither INT8 nor FP8 W8A8"
    if scheme.strategy != "channel" or scheme.is_static_input_scheme:
        return "weights need one scale a channel and activations one a token"
    if not getattr(scheme, "input_symmetric", True):
        return "asymmetric activations"
    return None


def require_platform() -> None:
    """Refuse what cannot work, and say when it was not tried.

    Raises:
        UnsupportedError: Too old a vLLM, or a GPU without Sparse Tensor Cores.
    """
    text = metadata.version("vllm")
    version = parse_version(text)
    tried = f"{version_text(OLDEST)} to {version_text(NEWEST)}"
    if version is not None and version < OLDEST:
        raise UnsupportedError("slidesparse with this vLLM", got=text, needed=tried, remedy='pip install -U "vllm"')
    if version is None or version > NEWEST:
        _say_once(f"slidesparse was tried with vLLM {tried}; this is {text}")
    capability = current_platform.get_device_capability()
    if capability is None:
        return
    if not current_platform.is_cuda() or capability.to_int() < LEAST_CAPABILITY:
        raise UnsupportedError(
            "slidesparse on this GPU",
            got=f"{current_platform.get_device_name()}, compute capability {capability.as_version_str()}",
            needed="an NVIDIA GPU with Sparse Tensor Cores, compute capability 8.0 or newer",
            remedy=SERVE_DENSE,
        )


@lru_cache(maxsize=16)
def _say_once(text: str) -> None:
    log.warning(text)
