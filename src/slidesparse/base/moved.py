"""Modules that 0.3 moved and that programs may import by their old names, for one release."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "slidesparse.linear": "slidesparse.layer.linear",
    "slidesparse.packed": "slidesparse.weights.packed",
    "slidesparse.pattern": "slidesparse.weights.pattern",
    "slidesparse.quant": "slidesparse.weights.quant",
    "slidesparse.recovery": "slidesparse.models.held_zeros",
    "slidesparse.slide": "slidesparse.weights.slide",
}
"""Old name -> the module that has its names now."""


class _MovedModules(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        new = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} is {new} now; 0.4 drops the old name", FutureWarning, stacklevel=2)
        vars(module).update({name: one for name, one in vars(import_module(new)).items() if name[:2] != "__"})


def keep_old_names() -> None:
    """Let the old names be imported, with a warning."""
    sys.meta_path.append(_MovedModules())
