"""Make the site out of files that lie beside ``docs``: records, the changelog, and how to contribute.

Pages link to these files as they lie in the repository (``../results/x``, ``docs/y.md``), so that the links work where
the files are read unbuilt. In the site everything lies below one root, so each link is made relative to its page there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
TOP = ("CHANGELOG.md", "CONTRIBUTING.md")
INDEX = "results/README.md"
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the files beside ``docs``."""
    records = (path.relative_to(ROOT).as_posix() for path in (ROOT / "results").rglob("*") if path.is_file())
    for name in (*TOP, *sorted(records)):
        if name != "results/descriptions.json":
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point the links of a page to where their targets are in the site."""
    source = page.file.src_uri
    beside = source in TOP or source.startswith("results/")
    here = (ROOT / source if beside else Path(config.docs_dir) / source).parent
    return LINK.sub(lambda found: found[1] + _in_site(found[2], here, Path(source).parent) + found[3], markdown)


def _in_site(target: str, here: Path, page_folder: Path) -> str:
    """Return a link relative to a page of the site, of a target relative to the page's folder in the repository."""
    path = Path(os.path.normpath(here / target)).relative_to(ROOT)
    if path == Path("README.md"):
        path = Path("docs/index.md")  # the site's own first page
    if (ROOT / path).is_dir():
        path = Path(INDEX)  # a folder of records has no page
    return os.path.relpath(path.relative_to("docs") if path.parts[0] == "docs" else path, page_folder or ".")
