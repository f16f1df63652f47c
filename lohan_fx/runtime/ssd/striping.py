"""Which bytes of a range lie in which file: stripes, and the system calls that move them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_IO_BYTES = 16 << 20
"""Bytes of one read or write system call at most."""

_MAX_SPANS = 1024  # IOV_MAX on Linux


class Stripe(NamedTuple):
    """A run of bytes that lies in one file."""

    file: int
    file_offset: int
    offset: int  # in the logical range
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class Piece:
    """One system call: adjacent stripes of one file, and where they lie in the buffer."""

    file: int
    file_offset: int
    num_bytes: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)  # (buffer offset, bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Striping:
    """Stripe k of `stripe_bytes` bytes lies in file k mod `num_files`."""

    num_files: int
    stripe_bytes: int

    def file_sizes(self, num_bytes: int) -> list[int]:
        """Bytes of each file, for a range of `num_bytes`."""
        sizes = [0] * self.num_files
        for stripe in self.stripes(0, num_bytes):
            sizes[stripe.file] += stripe.num_bytes
        return sizes

    def stripes(self, offset: int, num_bytes: int) -> Iterator[Stripe]:
        """The parts of a range, in order."""
        end = offset + num_bytes
        while offset < end:
            index, within = divmod(offset, self.stripe_bytes)
            length = min(self.stripe_bytes - within, end - offset)
            yield Stripe(
                file=index % self.num_files,
                file_offset=index // self.num_files * self.stripe_bytes + within,
                offset=offset,
                num_bytes=length,
            )
            offset += length

    def pieces(self, offset: int, num_bytes: int) -> list[Piece]:
        """Cut a transfer into system calls, the directories taking turns."""
        queues: list[list[Piece]] = [[] for _ in range(self.num_files)]
        for stripe in self.stripes(offset, num_bytes):
            queue = queues[stripe.file]
            for start in range(0, stripe.num_bytes, MAX_IO_BYTES):
                length = min(MAX_IO_BYTES, stripe.num_bytes - start)
                if (
                    not queue
                    or queue[-1].num_bytes + length > MAX_IO_BYTES
                    or len(queue[-1].spans) == _MAX_SPANS
                ):
                    queue.append(Piece(file=stripe.file, file_offset=stripe.file_offset + start))
                queue[-1].spans.append((stripe.offset - offset + start, length))
                queue[-1].num_bytes += length
        turns = itertools.zip_longest(*queues)
        return [piece for turn in turns for piece in turn if piece is not None]
