"""The options that every server takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from slidesparse.errors import InputError
from slidesparse.gemm.select import BACKENDS, Fallback, check_fallback
from slidesparse.integrations import NAME
from slidesparse.tuning.at_load import Tune, check_tune

Options = TypeVar("Options", bound="ServerOptions")


@dataclass(frozen=True)
class ServerOptions:
    """The options of one engine.

    Attributes:
        backend: ``auto`` or a backend's name, for every layer.
        fallback: How ``auto`` runs layers for which sparsity does not pay: see :mod:`slidesparse.gemm.select`.
        tune: ``auto`` measures layers of which this machine has no times when they are loaded, ``off`` uses a prior.
    """

    backend: str = "auto"
    fallback: Fallback = "dense"
    tune: Tune = "auto"

    @classmethod
    def read(cls: type[Options], given: object, option: str) -> Options:
        """Read the value of our key; None gives the defaults. ``option`` is the server's that holds the key.

        Raises:
            InputError: An unknown key or value.
        """
        known = set(cls.__dataclass_fields__)
        if given is None:
            return cls()
        if not isinstance(given, Mapping) or given.keys() - known:
            raise InputError(f"{NAME} in {option}", got=repr(given), needed=f"keys {sorted(known)}")
        options = cls(**given)
        if options.backend not in ("auto", *BACKENDS):
            needed = f"auto, {', '.join(BACKENDS)}"
            raise InputError(f"backend in {option}", got=repr(options.backend), needed=needed)
        check_fallback(options.fallback, f"fallback in {option}")
        check_tune(options.tune, f"tune in {option}")
        return options
