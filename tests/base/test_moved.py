"""Old names of modules are kept for one release."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from slidesparse.base.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_a_module_is_imported_by_its_old_name_with_a_warning(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=MOVED[old]):
        moved = import_module(old)
    for place in MOVED[old].split(" and "):
        new = import_module(place)
        public = [name for name, value in vars(new).items() if getattr(value, "__module__", None) == place]
        assert public
        assert all(getattr(moved, name) is getattr(new, name) for name in public)
