"""Read the user's options: ``--additional-config '{"slidesparse": {"backend": "cusparselt"}}'``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from slidesparse.errors import InputError
from slidesparse.gemm.select import BACKENDS, Fallback, check_fallback
from slidesparse.integrations.vllm.host_bound import HOST_US
from slidesparse.tuning.at_load import Tune, check_tune

Graphs = Literal["auto", "vllm"]
Experts = Literal["auto", "dense", "sparse"]

OPTIONS = "slidesparse"
"""The key of ``--additional-config`` that holds our options."""


@dataclass(frozen=True)
class Options:
    """The options of one engine.

    Attributes:
        backend: ``auto`` or a backend's name, for every layer.
        fallback: How ``auto`` runs layers for which sparsity does not pay: see :mod:`slidesparse.gemm.select`.
        fuse: Join RMSNorm, SiLU and neighbouring linears with our operators in compiled models.
        host_us: Microseconds that the host takes to launch one linear of a chain: see
            :mod:`slidesparse.integrations.vllm.host_bound`. 0 leaves every linear on the backend chosen for it.
        tune: ``auto`` measures layers of which this machine has no times when they are loaded, ``off`` goes by a prior.
        graphs: ``auto`` captures larger CUDA graphs where the host would be the slower one
            (:mod:`slidesparse.integrations.vllm.graph_sizes`), ``vllm`` those that vLLM captures.
        experts: ``auto`` runs pruned experts of mixtures by grouped products where that was measured to pay
            (:mod:`slidesparse.gemm.expert_times`), ``sparse`` wherever it can, ``dense`` leaves them to vLLM.
    """

    backend: str = "auto"
    fallback: Fallback = "dense"
    fuse: bool = True
    host_us: float = HOST_US
    tune: Tune = "auto"
    graphs: Graphs = "auto"
    experts: Experts = "auto"

    @classmethod
    def parse(cls, additional_config: object) -> Options:
        """Read vLLM's ``additional_config``; without our key, return the defaults.

        Raises:
            InputError: An unknown key or value.
        """
        given = additional_config.get(OPTIONS, {}) if isinstance(additional_config, Mapping) else {}
        known = set(cls.__dataclass_fields__)
        if not isinstance(given, Mapping) or given.keys() - known:
            raise InputError(f"{OPTIONS} in --additional-config", got=repr(given), needed=f"keys {sorted(known)}")
        options = cls(**given)
        if options.backend not in ("auto", *BACKENDS):
            _refuse("backend", options.backend, f"auto, {', '.join(BACKENDS)}")
        check_fallback(options.fallback, "fallback in --additional-config")
        if not isinstance(options.fuse, bool):
            _refuse("fuse", options.fuse, "true or false")
        check_tune(options.tune, "tune in --additional-config")
        if options.graphs not in ("auto", "vllm"):
            _refuse("graphs", options.graphs, "auto or vllm")
        if options.experts not in ("auto", "dense", "sparse"):
            _refuse("experts", options.experts, "auto, dense or sparse")
        if type(options.host_us) not in (int, float) or not 0 <= options.host_us < math.inf:
            _refuse("host_us", options.host_us, "microseconds, 0 or more")
        return replace(options, host_us=float(options.host_us))

    def to_json(self) -> str:
        """Return the options as a user would write them, defaults included.

        >>> for part in Options(fuse=False).to_json().split(', "host_us"'):
        ...     print(part)
        {"backend": "auto", "fallback": "dense", "fuse": false
        : 75.0, "tune": "auto", "graphs": "auto", "experts": "auto"}
        """
        return json.dumps(asdict(self))


def find_misplaced(additional_config: object) -> dict[str, object]:
    """Return those of our options that stand outside of our key, where nothing of ours reads them.

    >>> find_misplaced({"backend": "hopper", "slidesparse": {"tune": "off"}})
    {'backend': 'hopper'}
    """
    given = additional_config if isinstance(additional_config, Mapping) else {}
    return {name: value for name, value in given.items() if name in Options.__dataclass_fields__}


def _refuse(name: str, got: object, needed: str) -> None:
    raise InputError(f"{name} in --additional-config", got=repr(got), needed=needed)
