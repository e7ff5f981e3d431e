"""The options of text to calibrate and to train on: their arguments, and what they mean together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slidesparse.cli.arguments import Options, add_no_bos
from slidesparse.errors import InputError

if TYPE_CHECKING:
    from slidesparse.base.ranks import Ranks
    from slidesparse.offline.calibrate.calibration import Calibration

PROMPTS = "(default: general ones, which are made; some like your users' are better)"

WINDOWS = ("samples", "length", "seed")
"""Options that say which windows of the text are taken. Each is None unless it is given, so that it can be told
whether somebody asked for it; :class:`slidesparse.offline.calibrate.calibration.Calibration` has the usual values."""


def add_calibration(parser: Options, text: str) -> None:
    """Add the options of calibration text, which :func:`calibration_of` reads; ``text`` says what it is for."""
    add_texts(parser, "calibration", f"{text}; may be given again, with weights")
    add_own_chats(parser, "the model")
    add_no_bos(parser)
    parser.add_argument("--samples", type=int, help="calibration windows (default: 128)")
    parser.add_argument("--length", type=int, help="tokens of a window (default: 2048, or what the model can read)")
    parser.add_argument("--seed", type=int, help="which windows of the text are taken (default: 0)")


def add_texts(parser: Options, name: str, text: str) -> None:
    """Add an option that names files of text, and may give each a weight."""
    parser.add_argument(f"--{name}", action="append", default=[], metavar="FILE[:WEIGHT]", help=text)


def add_own_chats(parser: Options, model: str) -> None:
    """Add the options of chats that a model writes itself, which :func:`own_chats_of` reads."""
    text = f"generate N chats with {model}, and read them too (kept, and reused)"
    parser.add_argument("--self-chats", type=int, metavar="N", dest="own_chats", help=text)
    parser.add_argument("--prompts", metavar="FILE", help=f"prompts for --self-chats {PROMPTS}")


def planned_chats(options: argparse.Namespace) -> list[str]:
    """Return a name in the place of the file that :func:`own_chats_of` will return, to check options with."""
    return ["own chats"] if options.own_chats else []


def own_chats_of(options: argparse.Namespace, model: Path, device: str, ranks: Ranks) -> list[str]:
    """Return the file of chats that the options ask a model to write, once it is written; none where there is none."""
    if options.own_chats is None:
        if options.prompts is not None:
            raise InputError("options without effect", got="--prompts without --self-chats", needed="--self-chats N")
        return []
    from slidesparse.recovery.own_chats import ChatOptions, kept_chats

    return [str(kept_chats(model, ChatOptions(options.own_chats, options.prompts), device, ranks))]


def calibration_of(options: argparse.Namespace, own: Sequence[str] = ()) -> Calibration | None:
    """Return the texts that the options name and files of chats that the model wrote; None for magnitude."""
    from slidesparse.offline.calibrate.calibration import Calibration
    from slidesparse.offline.calibrate.texts import DEFAULT

    given = {name: getattr(options, name) for name in WINDOWS if getattr(options, name) is not None}
    if texts := [*options.calibration, *own]:
        return Calibration(texts[0], **given, more=tuple(texts[1:]), bos=not options.no_bos)
    if options.method != "magnitude":
        return Calibration(DEFAULT, **given, bos=not options.no_bos)
    if names := [*(f"--{name}" for name in given), *(["--no-bos"] if options.no_bos else [])]:
        raise InputError("magnitude takes no calibration text", got=", ".join(names), remedy="leave out --method")
    return None
