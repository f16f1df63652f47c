"""Files that appear all at once: a directory is written beside its place and exchanged with it.

Whenever the process is killed, the directory is the old one or the new one, complete. Tensors go
into safetensors files from where they lie, one after another.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import io
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lohan_fx._compat import is_wrapper_subclass
from lohan_fx.errors import LohanError, StorageError, format_bytes, format_need
from lohan_fx.manifest import HEADER, UNKNOWN, WHOLE_FILE, bytes_of
from lohan_fx.runtime.lane import Lane
from lohan_fx.weights import DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RELIEVE_BYTES = 64 << 20


class File(Protocol):
    """What `write_directory` writes."""

    @property
    def name(self) -> str: ...

    @property
    def num_bytes(self) -> int:
        """Its size, or a bound of it."""

    def write(self, file: io.BufferedWriter, relieve: Callable[[], None]) -> None:
        """Write it; `relieve` is called now and then."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A small file."""

    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())

    @property
    def checksums(self) -> Mapping[str, int]:
        return {WHOLE_FILE: zlib.crc32(self.text.encode())}

    def write(self, file: io.BufferedWriter, relieve: Callable[[], None]) -> None:
        file.write(self.text.encode())


class TensorFile:
    """A safetensors file: 8 bytes of the header's length, a JSON header, the tensors' bytes.

    Attributes:
        checksums: of header and tensors; a tensor's is known when it has been written.
    """

    def __init__(
        self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
    ) -> None:
        self.name = name
        # Larger items first, so that every tensor is aligned to its item size.
        self._tensors = dict(sorted(tensors.items(), key=lambda kv: -kv[1].element_size()))
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for key, t in self._tensors.items():
            begin, end = end, end + t.numel() * t.element_size()
            header[key] = {
                "dtype": DTYPE_NAMES[t.dtype],
                "shape": list(t.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self.data_bytes = end
        self.checksums = {HEADER: zlib.crc32(self._header), **dict.fromkeys(tensors, UNKNOWN)}

    @property
    def num_bytes(self) -> int:
        return len(self._header) + self.data_bytes

    def write(self, file: io.BufferedWriter, relieve: Callable[[], None]) -> None:
        """Write tensor by tensor, and make checksums beside the writes: neither needs the GIL."""
        file.write(self._header)
        since = 0
        with contextlib.closing(Lane("checksums")) as beside:
            for key, tensor in self._tensors.items():
                plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
                data = bytes_of(plain)
                checked = beside.submit(partial(self._check, key, data))
                file.write(data)
                checked.synchronize()
                since += len(data)
                del plain, data
                if since > _RELIEVE_BYTES:
                    since = 0
                    relieve()
        relieve()

    def _check(self, key: str, data: memoryview) -> None:
        self.checksums[key] = zlib.crc32(data)


def tensor_files(
    tensors: Mapping[str, Tensor], whole: str, max_bytes: int, metadata: Mapping[str, str]
) -> list[TensorFile | TextFile]:
    """One file, or shards of at most `max_bytes` (or of one tensor) with an index."""
    wrong = [k for k, t in tensors.items() if t.dtype not in DTYPE_NAMES or not is_plain(t)]
    if wrong:
        t = tensors[wrong[0]]
        raise LohanError(
            f"{wrong[0]} is a {type(t).__name__} of {t.dtype}, {t.layout}, which a safetensors "
            "file cannot hold"
        )
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + num_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += num_bytes
    if len(shards) == 1:
        return [TensorFile(whole, tensors, metadata)]
    stem = whole.removesuffix(".safetensors")
    files = [
        TensorFile(f"{stem}-{i:05}-of-{len(shards):05}.safetensors", shard, metadata)
        for i, shard in enumerate(shards, 1)
    ]
    places = {k: f.name for f, shard in zip(files, shards, strict=True) for k in shard}
    total = sum(f.data_bytes for f in files)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    return [*files, TextFile(f"{whole}.index.json", json.dumps(index, indent=1))]


def is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not is_wrapper_subclass(tensor)


def write_directory(
    target: Path,
    files: Sequence[File],
    *,
    replaces: Container[str] | None,
    relieve: Callable[[], None],
) -> None:
    """Write files into a new directory, and put it in the place of `target` in one step.

    Args:
        target: made, or replaced.
        files: what to write.
        replaces: names of files of the directory that is there that go with it; others come into
            the new one. None: it must be empty.
        relieve: called while writing, after every 64 MiB.

    Raises:
        StorageError: too little space, a failed write, something of others that would be lost.
            What was there before is unchanged.
    """
    target = Path(os.path.realpath(target))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _workspace(target) as new:
            kept = _foreign_files(target, replaces, {file.name for file in files})
            _check_space(new, sum(file.num_bytes for file in files))
            for file in files:
                with (new / file.name).open("wb") as out:
                    file.write(out, relieve)
                    out.flush()
                    os.fsync(out.fileno())
            for path in kept:
                copy = new / path.name
                shutil.copy2(path, copy, follow_symlinks=False)
                if not copy.is_symlink():
                    with copy.open("rb") as done:
                        os.fsync(done.fileno())
            _sync_directory(new)
            _replace(target, new)
    except OSError as error:
        raise StorageError(
            f"cannot write the checkpoint {target}: {error.strerror or error}"
            f"{f' ({error.filename})' if error.filename else ''}; what was there before is "
            "unchanged"
        ) from error


def _check_space(directory: Path, need_bytes: int) -> None:
    usage = os.statvfs(directory)
    have_bytes = usage.f_bavail * usage.f_frsize
    if need_bytes > have_bytes:
        raise StorageError(
            f"not enough space for a checkpoint in {directory.parent}: need "
            f"{format_need(need_bytes)}, have {format_bytes(have_bytes)}; free some, or choose "
            "another directory (the checkpoint that is there stays until the new one is complete)"
        )


def _foreign_files(target: Path, old: Container[str] | None, ours: Container[str]) -> list[Path]:
    """Files of others in the directory that is replaced; they go into the new one."""
    if not target.exists():
        return []
    if not target.is_dir():
        raise StorageError(f"{target} is a file: name a directory")
    there = sorted(target.iterdir())
    if there and old is None:
        raise StorageError(
            f"{target} is not empty and no checkpoint of lohan_fx (it has {there[0].name}): "
            "saving would replace it. Name a directory of its own"
        )
    foreign = [p for p in there if p.name not in ours and (old is None or p.name not in old)]
    directories = [path.name for path in foreign if path.is_dir()]
    if directories:
        raise StorageError(
            f"{target} has the directory {directories[0]} in it, which saving would remove: move "
            "that, or name another directory"
        )
    return foreign


def _previous(target: Path) -> Path:
    return target.parent / f".{target.name}.previous"


@contextlib.contextmanager
def _workspace(target: Path) -> Iterator[Path]:
    """A new directory beside `target`. It is locked while its process lives: what dead ones left is
    removed first."""
    prefix = f".{target.name}.saving-"
    previous = _previous(target)
    if previous.is_dir():
        if target.exists():
            shutil.rmtree(previous)
        else:
            previous.rename(target)
    for path in target.parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):  # alive, or going away by itself
            lock = _lock(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    with _new_directory(target.parent, prefix) as path:
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _new_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a directory and hold its lock. Before it is held, another save may remove it as a dead
    one's: then there is another. Where there are no locks, nobody removes what dead ones left."""
    with contextlib.ExitStack() as stack:
        while True:
            path = parent / f"{prefix}{secrets.token_hex(8)}"
            path.mkdir()
            try:
                lock = _lock(path)
            except (BlockingIOError, FileNotFoundError):
                continue
            except OSError:
                break
            stack.callback(os.close, lock)
            if os.fstat(lock).st_nlink:
                break
        yield path


def _lock(path: Path) -> int:
    """Lock a directory. Raises BlockingIOError if somebody else has, another OSError where the
    file system has no locks."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _replace(target: Path, new: Path) -> None:
    """Put `new` in the place of `target`; afterwards `new` is the old one, or gone.

    File systems that cannot exchange two directories get two renames; `load` finds the old
    checkpoint if the process ends between them.
    """
    if not target.exists():
        new.rename(target)
    elif not _exchange(target, new):
        target.rename(_previous(target))
        new.rename(target)
        _sync_directory(target.parent)
        shutil.rmtree(_previous(target))
    _sync_directory(target.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two directories atomically; False if the file system cannot."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(a))


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that syncs no directories
            raise
    finally:
        os.close(fd)


def found(directory: Path) -> Path:
    """Where the directory is, also if its replacement was cut short between two renames."""
    target = Path(os.path.realpath(directory))
    try:
        return _previous(target) if not target.exists() and _previous(target).is_dir() else target
    except OSError as error:
        raise StorageError(f"cannot use {directory}: {error.strerror}; name another") from error
