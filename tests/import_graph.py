"""Which files of a package import which names, themselves and through other files of it: read from the source text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def imports(path: Path, root: Path) -> tuple[str, ...]:
    """Every name that a file of the package in ``root`` imports, wherever in the file."""
    return tuple(_names(path.read_text(encoding="utf-8"), path, root))


def _names(source: str, path: Path, root: Path) -> Iterator[str]:
    """Absolute names: ``from a import b`` gives ``a.b``."""
    package = (root.name, *path.relative_to(root).parts[:-1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _files(name: str, root: Path) -> Iterator[Path]:
    """The files of the package that run when ``name`` is imported: its module, and the packages around it.

    Without the package's own ``__init__``, the public face, which imports nearly everything.
    """
    parts = name.split(".")
    for length in range(2, len(parts) + 1 if parts[0] == root.name else 0):
        place = root.joinpath(*parts[1:length])
        yield from (path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file())


def _neighbours(path: Path, root: Path) -> set[Path]:
    """The files that a file imports, but for the packages that it is in: they run whoever imports it."""
    found = {file for name in imports(path, root) for file in _files(name, root)}
    return {file for file in found if file.name != "__init__.py" or file.parent not in path.parents}


def chains(path: Path, root: Path) -> dict[Path, tuple[Path, ...]]:
    """Every file that a file imports, however far away -> the shortest chain of imports from it to there."""
    found, waiting = {path: (path,)}, [path]
    for current in waiting:
        new = _neighbours(current, root) - set(found)
        found |= {file: (*found[current], file) for file in new}
        waiting += sorted(new)
    return found
