"""``checkpoint.json``: what a checkpoint has in its files, and the checksums that they are read by.

Checksums are CRC-32s: of every tensor, of every safetensors header, of every other file, and of the
description itself. They are made while files are written and compared while they are read, tensor
by tensor, so neither needs the memory of a whole file nor a second pass over it. They find what a
disk or a copy changed, not what somebody changed on purpose. Checkpoints of before have none.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lohan_fx.errors import CheckpointError
from lohan_fx.reading import Reader, json_of

FORMAT = "lohan_fx checkpoint"
VERSION = 1
DESCRIPTION = "checkpoint.json"

HEADER = "__header__"
"""The part of a safetensors file before its tensors: length and JSON."""
WHOLE_FILE = "__file__"
"""The one part of any other file."""

Checksums: TypeAlias = Mapping[str, Mapping[str, int]]
"""File name → its tensors, and `HEADER` or `WHOLE_FILE` → CRC-32."""

UNKNOWN = 0xFFFF_FFFF
"""In the place of one that is still to be made: as long as any, so that sizes are known before."""


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    flat = tensor.detach().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def write(description: Mapping[str, Any], checksums: Checksums) -> str:
    """The text of ``checkpoint.json``."""
    whole = {**description, "checksums": checksums}
    return json.dumps({**whole, "checksum": _checksum(whole)})


def read(directory: Path, *, verify: bool = True) -> dict[str, Any]:
    """Read the description of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged, or of another format or version.
    """
    file = directory / DESCRIPTION
    try:
        found = json_of(file)
    except OSError as error:
        raise CheckpointError(
            f"{directory} is no checkpoint of lohan_fx.save: cannot read {file}: {error.strerror}; "
            "name the folder that was given to save (lohan_fx.latest finds the newest in a folder)"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}; load another checkpoint") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(f"{file} is of another format than {FORMAT!r}")
    if found.get("version") != VERSION:
        raise CheckpointError(
            f"{file} is of version {found.get('version')}; this lohan_fx reads {VERSION}"
        )
    saved = found.pop("checksum", None)
    if verify and saved is not None and saved != _checksum(found):
        raise CheckpointError(
            f"{file} is damaged: it has other values than were saved. Load another checkpoint; if "
            'you changed them on purpose, remove its last entry, "checksum"'
        )
    reader = reader_of(directory)
    step = found.get("step", ...)
    if not isinstance(step, int | None) or isinstance(step, bool):
        raise reader.wrong("step", step, "a whole number or null")
    for key in ("extra", "random"):
        reader.read(dict[str, Any], found.get(key), key)
    reader.read(tuple[str, ...], found.get("files"), "files")
    reader.read(dict[str, dict[str, int]], found.get("checksums", {}), "checksums")
    return found


def reader_of(directory: Path) -> Reader:
    """Reads parts of the description in a directory; raises CheckpointErrors."""
    return Reader(what=str(directory / DESCRIPTION), error=CheckpointError)


def checksums_in(directory: Path) -> Checksums:
    """The checksums of the files in a directory; none if it is no checkpoint, or an older one.

    Raises:
        CheckpointError: it is one, and its description is damaged.
    """
    try:
        is_ours = FORMAT.encode() in (directory / DESCRIPTION).read_bytes()
    except OSError:
        return {}
    found: Checksums = read(directory).get("checksums", {}) if is_ours else {}
    return found


def check(path: Path, part: str, data: bytes | memoryview, checksums: Mapping[str, int]) -> None:
    """Compare what was read with its checksum, if it has one.

    Raises:
        CheckpointError: they differ.
    """
    saved = checksums.get(part)
    if saved is None or saved == zlib.crc32(data):
        return
    what = {HEADER: "its header", WHOLE_FILE: "it"}.get(part, f"tensor {part}")
    raise CheckpointError(
        f"{path} is damaged: {what} has other bytes than were saved ({len(data):,} B of CRC-32 "
        f"{zlib.crc32(data):08x}, saved {saved:08x}). Copy the file again from where it is whole, "
        "or load another checkpoint; load(…, verify=False), or the file's own path as weights=, "
        "reads it as it is"
    )


def _checksum(description: Mapping[str, Any]) -> int:
    # values come back from JSON as they were, and in their order
    return zlib.crc32(json.dumps(description).encode())
