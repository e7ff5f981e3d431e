"""Write the tables of docs/models.md: the architectures that the tests cover, and what becomes of each.

python docs/draw_models.py            # say whether the page is current
python docs/draw_models.py --write
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/models.md"
MARKED = re.compile(r"(<!-- models -->\n).*?(<!-- end -->)", re.DOTALL)

sys.path.insert(0, str(ROOT / "tests"))


def groups() -> dict[str, dict[str, Any]]:
    """Kind of model -> name -> architecture, as the tests have them."""
    from small_decoders import DECODERS
    from small_encoders import ENCODERS
    from small_mixtures import MIXTURES
    from small_multimodal import MULTIMODAL

    return {
        "writes text": DECODERS,
        "reads text or listens": ENCODERS,
        "sees or hears": MULTIMODAL,
        "mixture of experts": MIXTURES,
    }


def outcome_of(one: Any) -> str:
    """What the package does with an architecture."""
    return "refused" if one.refused else "treated in a float type" if one.not_quantised else "treated"


def table() -> str:
    """Architectures by kind and outcome."""
    rows = []
    for kind, members in groups().items():
        for outcome in ("treated", "treated in a float type", "refused"):
            found = {one.model: None for one in members.values() if outcome_of(one) == outcome}
            if found:
                names = ", ".join(f"`{name}`" for name in sorted(found))
                rows.append(f"| {kind} | {outcome} | {names} |")
    return "\n".join(["| kind | outcome | classes of transformers |", "|---|---|---|", *rows]) + "\n"


def drawn(text: str) -> str:
    """The page with its table as the tests have it."""
    return MARKED.sub(lambda found: found[1] + table() + found[2], text)


def main() -> int:
    """Compare, or write."""
    text = PAGE.read_text()
    if "--write" in sys.argv:
        PAGE.write_text(drawn(text))
    return 0 if drawn(text) == text or "--write" in sys.argv else 1


if __name__ == "__main__":
    raise SystemExit(main())
