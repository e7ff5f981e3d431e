"""The options that the SGLang plugin takes."""

from __future__ import annotations

from dataclasses import dataclass

from slidesparse.integrations.options import Experts, ServerOptions

OPTION = "--json-model-override-args"
"""The option of SGLang's that holds ours, under our name: it has no other place for a plugin's."""


@dataclass(frozen=True)
class SGLangOptions(ServerOptions):
    """The options of one engine.

    Attributes:
        experts: How pruned experts of mixtures run.
    """

    experts: Experts = "auto"
