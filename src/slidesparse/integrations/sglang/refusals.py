"""Read the user's options, and refuse what cannot work with sparse layers, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.select import BACKENDS, Fallback, check_fallback
from slidesparse.integrations.vllm.refused import RANDOM, SAVED, refuse_load_format
from slidesparse.tuning.at_load import Tune, check_tune

OPTIONS = "slidesparse"
"""The key of ``--json-model-override-args`` that holds our options: SGLang has no other place for a plugin's."""

SERVE_DENSE = "serve dense, without the plugin (SGLANG_PLUGINS=none)"

LOAD_FORMATS = {"dummy": RANDOM, "presharded": SAVED, "remote_instance": SAVED, "sharded_state": SAVED}
"""``--load-format`` that sparse layers cannot be made from -> what it brings instead of a checkpoint's weights."""


TENSORS_KEPT = "redis:"
"""How addresses begin at which ``--load-format remote`` finds another engine's tensors; at others it finds files."""


@dataclass(frozen=True)
class SGLangOptions:
    """The options of one engine.

    Attributes:
        backend: ``auto`` or a backend's name, for every layer.
        fallback: How ``auto`` runs layers for which sparsity does not pay: see :mod:`slidesparse.gemm.select`.
        tune: ``auto`` measures the kinds of layers that this machine has no times of, once, some seconds for a model;
            ``off`` goes by a prior.
    """

    backend: str = "auto"
    fallback: Fallback = "dense"
    tune: Tune = "auto"

    @classmethod
    def parse(cls, given: object) -> SGLangOptions:
        """Read the value of our key; None gives the defaults.

        Raises:
            InputError: An unknown key or value.
        """
        where, known = f"{OPTIONS} in --json-model-override-args", set(cls.__dataclass_fields__)
        if given is None:
            return cls()
        if not isinstance(given, Mapping) or given.keys() - known:
            raise InputError(where, got=repr(given), needed=f"keys {sorted(known)}")
        options = cls(**given)
        if options.backend not in ("auto", *BACKENDS):
            raise InputError(f"backend of {where}", got=repr(options.backend), needed=f"auto, {', '.join(BACKENDS)}")
        check_fallback(options.fallback, f"fallback of {where}")
        check_tune(options.tune, f"tune of {where}")
        return options


def refuse_what_cannot_work(arguments: Any) -> None:
    """Refuse the arguments of a server that sparse layers do not support.

    Raises:
        UnsupportedError: A load format that brings other tensors than a checkpoint's, LoRA adapters, which add to a
            dense weight, or offloading, which knows parameters alone and no packed weights.
    """
    kept = str(getattr(arguments, "model_path", "")).startswith(TENSORS_KEPT)
    refuse_load_format(arguments, LOAD_FORMATS | ({"remote": SAVED} if kept else {}), SERVE_DENSE)
    if getattr(arguments, "enable_lora", None) or getattr(arguments, "lora_paths", None):
        got = "--enable-lora or --lora-paths"
        raise UnsupportedError("LoRA adapters on sparse layers", got=got, remedy=SERVE_DENSE)
    for name in ("cpu_offload_gb", "offload_group_size"):
        if (value := getattr(arguments, name, None) or 0) > 0:
            got, remedy = f"--{name.replace('_', '-')} {value}", f"drop it, or {SERVE_DENSE}"
            raise UnsupportedError("offloading the weights of sparse layers", got=got, remedy=remedy)


def largest_batch(arguments: Any) -> int:
    """Return the tokens of the largest batch that a server will run, as far as its arguments say."""
    chunk = getattr(arguments, "chunked_prefill_size", None) or 0
    return chunk if chunk > 0 else getattr(arguments, "max_prefill_tokens", None) or 0
