"""Models of the Hugging Face hub, fetched into huggingface_hub's own cache and read there.

Revisions, tokens, the cache and the offline mode are huggingface_hub's: ``HF_TOKEN``, ``HF_HOME``, ``HF_HUB_OFFLINE``,
``HF_ENDPOINT``. Pickles and Python code are not fetched.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from slidesparse.base.log import LOG
from slidesparse.base.other_libraries import need
from slidesparse.base.paths import usable_path
from slidesparse.base.progress import bars_shown
from slidesparse.errors import CheckpointError, InputError, first_line

TEXTS = ("*.json", "*.jinja", "*.jsonl", "*.model", "*.tiktoken", "*.txt")
FETCHED = (*TEXTS, "*.md", "*LICENSE*", "*LICENCE*", "*NOTICE*", "*.safetensors")
"""Patterns of the files that are fetched."""

INDISPENSABLE = ("config.json", "*.safetensors", "*.safetensors.index.json")
"""Patterns of the files without which a cache has no model; a server may have fetched no others."""

OTHER_WEIGHTS = ("original/*", "onnx/*", "openvino/*", "coreml/*", "consolidated*")
"""The same weights for other programs."""

NAMESPACE_AND_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)

SNAPSHOT = re.compile(r"models--(?P<namespace>.+?)--(?P<name>.+)/snapshots/(?P<commit>[^/]+)")
"""Path of a snapshot in huggingface_hub's cache."""


class HubModel(NamedTuple):
    """A model of a hub: ``namespace/name``, and the commit of the files."""

    repository: str
    commit: str


def source_folder(source: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return the folder of a checkpoint: a local one, or that of a model of the hub, fetched if needed.

    A local folder comes before a model of the same name. Only text of the form ``namespace/name`` is looked up on the
    hub, never a :class:`~pathlib.Path`.

    Raises:
        InputError: The source is no path, or is a local folder and has a revision.
        CheckpointError: There is neither such a folder nor such a model; or the model cannot be fetched.
        UnsupportedError: huggingface_hub is not installed.
    """
    path = usable_path(source, "source")
    if os.path.lexists(path):
        if revision is not None:
            raise InputError(
                f"{path} is a local folder", got=f"revision {revision}", needed="no revision: it is for the hub"
            )
        return path
    if not isinstance(source, str) or NAMESPACE_AND_NAME.fullmatch(source) is None:
        raise CheckpointError(
            f"no checkpoint folder at {path}", needed="a local folder, or a model of the hub as NAMESPACE/NAME"
        )
    if revision == "":
        raise InputError("--revision", got="nothing", needed="the name of a branch, a tag or a commit")
    return _fetched(source, revision)


def _fetched(repository: str, revision: str | None) -> Path:
    what = f"there is no folder {repository}, and huggingface_hub, which asks the hub, is not installed"
    hub, utils = (need(name, what=what) for name in ("huggingface_hub", "huggingface_hub.utils"))
    if not bars_shown():
        utils.disable_progress_bars()
    how = {"revision": revision, "library_name": "slidesparse", "ignore_patterns": [*OTHER_WEIGHTS]}
    with _explained(repository, revision):
        try:
            return Path(hub.snapshot_download(repository, allow_patterns=[*FETCHED], **how))
        except utils.LocalEntryNotFoundError as error:
            wanted: dict[str, Any] = {"allow_patterns": [*INDISPENSABLE], "local_files_only": True}
            try:
                found = Path(hub.snapshot_download(repository, **wanted, **how))
            except utils.LocalEntryNotFoundError:
                raise error from error.__cause__  # whose words are of the network
            LOG.warning("%s is read from the cache, without what is not there: %s", repository, first_line(error))
            return found


def hub_model(folder: Path) -> HubModel | None:
    """Return the hub's model of a folder in huggingface_hub's cache; None for any other folder.

    >>> hub_model(Path("/cache/models--Qwen--Qwen2.5-7B/snapshots/d149729398750b98"))
    HubModel(repository='Qwen/Qwen2.5-7B', commit='d149729398750b98')
    """
    found = SNAPSHOT.fullmatch("/".join(folder.absolute().parts[-3:]))
    return None if found is None else HubModel(f"{found['namespace']}/{found['name']}", found["commit"])


@contextmanager
def _explained(repository: str, revision: str | None) -> Iterator[None]:
    """Turn any error of a fetch into one line."""
    from huggingface_hub import constants, errors

    try:
        yield
    except Exception as error:  # network errors have the classes of the library that huggingface_hub builds on
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free some space, or let HF_HOME name another place, and run again: it goes on from there"
            raise CheckpointError(f"the disk of {constants.HF_HUB_CACHE} is full", remedy=remedy) from error
        what = f"there is no folder {repository}, and a model of that name cannot be fetched"
        got: str | None = first_line(error).rstrip(".")
        needed, remedy = None, "check the network and the name, and run again: what was fetched is kept"
        if isinstance(error, errors.GatedRepoError):
            what, got = f"{repository} is a gated model", None
            remedy = "request access on the model's page, and set HF_TOKEN"
        elif isinstance(error, errors.RevisionNotFoundError):
            what, got = f"{repository} has no such revision", revision
            needed, remedy = "a branch, a tag or a commit of it", "correct the revision"
        elif isinstance(error, errors.RepositoryNotFoundError):
            what, got = f"there is no folder {repository}, and no such model on the hub", None
            remedy = "correct the name; a private model needs HF_TOKEN"
        elif constants.HF_HUB_OFFLINE:
            what = f"there is no folder {repository}, and not all of such a model is in the cache"
            got = f"HF_HUB_OFFLINE, so nothing is fetched ({got})"
            remedy = "correct the name, or fetch the model without HF_HUB_OFFLINE"
        raise CheckpointError(what, got=got, needed=needed, remedy=remedy) from error
