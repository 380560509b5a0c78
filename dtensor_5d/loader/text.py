"""Text to train on: a file, a folder, or the sources of the installed Python standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

from dtensor_5d.errors import PlanError, Violation

__all__ = ["read_documents", "split_documents"]

# Folders of the standard library that are tests or add-ons, and third-party packages below it.
_NOT_LIBRARY = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"})


def read_documents(path: str | Path | None = None, *, max_bytes: int | None = None) -> list[str]:
    """The documents of a text: one for each file, in an order that does not depend on the machine.

    path: a file, or a folder that is searched with all its subfolders (hidden files and files that are not UTF-8 are
    left out); None: the Python sources of the installed standard library, which are always there. max_bytes: enough is
    enough; the last document is cut.

    Example:
        >>> documents = read_documents(max_bytes=1_000_000)

    Errors: PlanError if there is no such path, the file is not UTF-8, or there is no text in it.
    """
    if max_bytes is not None and max_bytes < 1:
        raise PlanError(Violation(f"max_bytes={max_bytes}", "must be at least 1", "give None for all of the text"))
    documents: list[str] = []
    size = 0
    for file in _files(path):
        if max_bytes is not None and size >= max_bytes:
            break
        try:
            data = file.read_bytes()
            text = data.decode()
        except UnicodeDecodeError as error:
            if path is not None and Path(path).is_file():
                asked = f"{file} (byte {error.object[error.start]:#04x} at {error.start})"
                raise PlanError(Violation(asked, "must be UTF-8 text", "convert it, or give another file")) from None
            continue
        if max_bytes is not None and size + len(data) > max_bytes:
            text = data[: max_bytes - size].decode(errors="ignore")  # not half a character
        if text:
            documents.append(text)
        size += len(data)
    if not documents:
        raise PlanError(Violation(f"no text in {path or 'the standard library'}", "needs at least 1 byte of UTF-8 text",
                                  "give a file or folder with text"))  # fmt: skip
    return documents


def _files(path: str | Path | None) -> list[Path]:
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        return sorted(f for f in root.rglob("*.py") if not _NOT_LIBRARY & set(f.relative_to(root).parts))
    root = Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise PlanError(Violation(f"{root}", "must be a file or a folder", "give the path of a text that exists"))
    visible = (f for f in root.rglob("*") if not any(part.startswith(".") for part in f.relative_to(root).parts))
    return sorted(f for f in visible if f.is_file())


def split_documents(documents: Sequence[str], validation: float, *, seed: int = 0) -> tuple[list[str], list[str]]:
    """(training, validation) documents; about `validation` (0 to 1) of the characters are for validation.

    Whole documents, drawn with `seed`; a single document gives its tail. Both parts have text.
    Errors: PlanError for a share outside (0, 1), or a text too short to cut.
    """
    if not 0 < validation < 1:
        raise PlanError(Violation(f"validation={validation}", "must be between 0 and 1", "give for example 0.05"))
    total = sum(map(len, documents))
    if total < 2:
        raise PlanError(Violation(f"a text of {total} characters", "needs at least 2 to be cut", "give more text"))
    wanted = max(1, round(total * validation))
    if len(documents) == 1:
        at = max(1, total - wanted)
        return [documents[0][:at]], [documents[0][at:]]
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    held: set[int] = set()
    size = 0
    for i in order[:-1]:
        # A document that overshoots by more than it helps stays in training.
        if abs(size + len(documents[i]) - wanted) < wanted - size:
            held.add(i)
            size += len(documents[i])
    if not held:
        held.add(min(range(len(documents)), key=lambda i: len(documents[i])))
    return [d for i, d in enumerate(documents) if i not in held], [documents[i] for i in sorted(held)]
