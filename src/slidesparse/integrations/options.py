"""The options of every server."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, get_type_hints

import torch

from slidesparse.base.typed_json import decode
from slidesparse.errors import InputError
from slidesparse.gemm.select import BACKENDS, Fallback
from slidesparse.integrations import NAME
from slidesparse.tuning.at_load import LoadTuner, Tune

Options = TypeVar("Options", bound="ServerOptions")

Experts = Literal["auto", "dense", "sparse"]
"""``auto`` runs pruned experts of mixtures by grouped products where these were measured to be faster
(:mod:`slidesparse.gemm.expert_times`), ``sparse`` wherever possible, ``dense`` leaves them to the server."""


@dataclass(frozen=True)
class ServerOptions:
    """The options of one engine.

    Attributes:
        backend: ``auto`` or a backend's name, for every layer.
        fallback: Backend of ``auto`` for layers that sparsity does not speed up: see :mod:`slidesparse.gemm.select`.
        tune: ``auto`` measures layers without times on this machine when they are loaded, ``off`` none.
        fuse: Join RMSNorm and SiLU with our operators; in vLLM's compiled models neighbouring linears too.
        experts: Run of pruned experts of mixtures.
    """

    backend: str = "auto"
    fallback: Fallback = "dense"
    tune: Tune = "auto"
    fuse: bool = True
    experts: Experts = "auto"

    def tuner(self, most: int, dtype: torch.dtype, log: logging.Logger) -> LoadTuner | None:
        """Return the tuner that measures layers when they are loaded; None with ``tune`` off."""
        return None if self.tune == "off" else LoadTuner(most, dtype, log)

    @classmethod
    def read(cls: type[Options], given: object, option: str) -> Options:
        """Read the value of our key in the server's ``option``, or raise an InputError; None gives the defaults."""
        given, kinds = {} if given is None else given, get_type_hints(cls)
        if not isinstance(given, Mapping) or given.keys() - kinds.keys():
            raise InputError(f"{NAME} in {option}", got=repr(given), needed=f"keys {sorted(kinds)}")
        options = cls(**{name: decode(kinds[name], value, f"{name} in {option}") for name, value in given.items()})
        if options.backend not in ("auto", *BACKENDS):
            needed = f"auto, {', '.join(BACKENDS)}"
            raise InputError(f"backend in {option}", got=repr(options.backend), needed=needed)
        return options
