"""Read the PTX of one kernel: its statements in order, with the places of its labels.

Only what NVRTC writes for the package's kernels is understood; anything else is an error that names it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ptx_emulator.state import DYNAMIC_START

DECLARED = re.compile(
    r"\.(param|shared)\s+(?:\.align\s+(\d+)\s+)?\.[bsuf](\d+)\s+(?:\.ptr\s[^,)]*?\.align\s+\d+\s+)?([\w$]+)(\[\d*\])?"
)
"""A parameter or a shared array: space, alignment, bits of an element, name, elements."""

SCOPED = re.compile(r"\.reg\s+\.\w+\s+([\w, ]+)")


@dataclass(frozen=True)
class Statement:
    """One instruction.

    Attributes:
        name: Its name and modifiers, such as ``add.s32``.
        operands: Registers, numbers, ``[address + offset]`` or ``{...}``, as they are written.
        guard: The predicate register that lets it run; empty without one.
        inverted: Whether the guard must be false instead.
    """

    name: str
    operands: tuple[str, ...]
    guard: str = ""
    inverted: bool = False


@dataclass
class Program:
    """A kernel.

    Attributes:
        statements: In order.
        labels: The index of the statement that a label stands before.
        symbols: The offsets of parameters among the arguments, and of arrays in shared memory.
        shared_bytes: Where dynamic shared memory starts.
    """

    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = DYNAMIC_START


def read_program(text: str) -> Program:
    """Read the only kernel of a PTX text."""
    text = re.sub(r"//[^\n]*", "", text.replace("\0", ""))
    body = text[text.index("\n{", text.index(".entry")) + 2 : text.rindex("}")]
    program, count = Program(), 0
    _declare(program, text)
    scopes: list[tuple[dict[str, str], int]] = []
    for piece in _pieces(body):
        if piece == "{":
            count += 1
            scopes.append(({}, count))
        elif piece == "}":
            scopes.pop()
        elif piece.endswith(":"):
            program.labels[_scoped(piece[:-1], scopes, new=True)] = len(program.statements)
        elif piece.startswith(".reg"):
            names = SCOPED.match(piece)
            if scopes and names:
                for name in names[1].split(","):
                    _scoped(name.strip(), scopes, new=True)
        elif not piece.startswith("."):
            program.statements.append(_statement(piece, scopes))
    return program


def _declare(program: Program, text: str) -> None:
    """Give parameters and shared arrays their places; the dynamic array, which has no size, comes last."""
    ends = {"param": 0, "shared": DYNAMIC_START}
    for space, align, bits, name, count in sorted(DECLARED.findall(text), key=lambda found: found[-1] == "[]"):
        size, length = int(bits) // 8, int(count.strip("[]") or count != "[]")
        start = -(-ends[space] // int(align or size)) * int(align or size)
        program.symbols[name], ends[space] = start, start + size * length
    program.shared_bytes = ends["shared"]


def _pieces(body: str) -> list[str]:
    """Cut into statements, labels and the braces of scopes; braces around operands stay."""
    pieces, at = [], 0
    pattern = re.compile(r"\s*(?:([{}])|([$\w]+:)|((?:[^;{}]|\{[^{};]*\})+);)", re.DOTALL)
    while body[at:].strip():
        found = pattern.match(body, at)
        assert found, body[at : at + 80]
        pieces.append(next(group for group in found.groups() if group).strip())
        at = found.end()
    return pieces


def _scoped(name: str, scopes: list[tuple[dict[str, str], int]], new: bool = False) -> str:
    """Return the unique name of what a name means here: inline code declares registers and labels of its own."""
    if new and scopes:
        names, number = scopes[-1]
        names[name] = f"{name}@{number}"
    return next((names[name] for names, _ in reversed(scopes) if name in names), name)


def _statement(piece: str, scopes: list[tuple[dict[str, str], int]]) -> Statement:
    guard, inverted = "", False
    if piece.startswith("@"):
        first, piece = piece.split(None, 1)
        inverted, guard = first[1] == "!", _scoped(first.lstrip("@!"), scopes)
    name, _, rest = piece.strip().partition(" ") if " " in piece else piece.strip().partition("\t")
    operands = [
        " ".join(part.split()) for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest.replace("\t", " "))
    ]
    named = (re.sub(r"[%$\w]+", lambda name: _scoped(name[0], scopes), part) for part in operands)
    return Statement(name.strip(), tuple(named), guard, inverted)
