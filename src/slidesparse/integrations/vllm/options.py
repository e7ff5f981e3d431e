"""Read the user's options: ``--additional-config '{"slidesparse": {"backend": "cusparselt"}}'``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from slidesparse.integrations import NAME
from slidesparse.integrations.options import ServerOptions

Graphs = Literal["auto", "vllm"]

OPTION = "--additional-config"
"""vLLM's option that takes ours, under our name."""


@dataclass(frozen=True)
class Options(ServerOptions):
    """The options of one engine.

    Attributes:
        graphs: ``auto`` captures larger CUDA graphs where the host would be slower than the GPU
            (:mod:`slidesparse.integrations.vllm.graph_sizes`), ``vllm`` only vLLM's.
    """

    graphs: Graphs = "auto"

    @classmethod
    def parse(cls, additional_config: object) -> Options:
        """Read vLLM's ``additional_config``, or raise an InputError; without our key, return the defaults."""
        given = additional_config.get(NAME, {}) if isinstance(additional_config, Mapping) else {}
        return cls.read(given, OPTION)


def find_misplaced(additional_config: object) -> dict[str, object]:
    """Return our options that are outside of our key, where nothing reads them.

    >>> find_misplaced({"backend": "hopper", "slidesparse": {"tune": "off"}})
    {'backend': 'hopper'}
    """
    given = additional_config if isinstance(additional_config, Mapping) else {}
    return {name: value for name, value in given.items() if name in Options.__dataclass_fields__}
