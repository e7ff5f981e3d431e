"""Write docs/modules.md: every module of the package, in the order of its layers, with its docstring's first sentence.

python docs/draw_modules.py            # say whether the page is current
python docs/draw_modules.py --write
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src/slidesparse"
PAGE = ROOT / "docs/modules.md"

HEAD = """# Map of modules

Every file below `src/slidesparse/`, from the theory to the command line. A module may import those of earlier sections
and the others of its own folder. `python docs/draw_modules.py --write` draws this page from `tests/test_imports.py` and
the first sentence of each file.
"""


def layers() -> list[set[str]]:
    """The parts of the package, lowest first, as the import test has them."""
    source = ast.parse((ROOT / "tests/test_imports.py").read_text())
    (value,) = (
        node.value
        for node in source.body
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["LAYERS"]
    )
    found: list[set[str]] = ast.literal_eval(value)
    return found


def files() -> list[Path]:
    """Every module and kernel source with something in it."""
    found = (path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".cu", ".cuh") and path.read_text().strip())
    return sorted(path for path in found if path != PACKAGE / "__init__.py")


def part(path: Path) -> str:
    """The folder or file directly below the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def sentence(path: Path) -> str:
    """What a file says it is."""
    text = path.read_text()
    if path.suffix in (".cu", ".cuh"):
        first = itertools.takewhile(lambda line: line.startswith("// "), text.splitlines())
        return " ".join(line.removeprefix("// ").strip() for line in first)
    paragraph = " ".join((ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].split())
    plain = re.sub(r":\w+:`~?(?:slidesparse\.)?([^`]+)`", r"`\1`", paragraph).replace("``", "`")
    return plain.replace("|", r"\|").rstrip(":")


def page() -> str:
    """The whole page: a section for each layer."""
    sections = [HEAD]
    for layer in layers():
        rows = [path for path in files() if part(path) in layer]
        if rows:
            rooms = [name + ("/" if (PACKAGE / name).is_dir() else ".py") for name in sorted(layer)]
            lines = [f"| `{path.relative_to(PACKAGE).as_posix()}` | {sentence(path)} |" for path in rows]
            sections.append("\n".join([f"## {', '.join(rooms)}", "", "| file | content |", "|---|---|", *lines]) + "\n")
    return "\n".join(sections)


def main() -> int:
    """Write the page, or say whether it is current."""
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page())
        return 0
    if PAGE.exists() and PAGE.read_text() == page():
        return 0
    print("docs/modules.md is not current; run with --write")
    return 1


if __name__ == "__main__":
    sys.exit(main())
