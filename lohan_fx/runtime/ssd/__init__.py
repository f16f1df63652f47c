"""The SSD tier: files striped over several directories, read and written with O_DIRECT.

syscalls       the raw system calls, and what their errors mean
run_directory  the private place of one run in each of the user's SSD directories
io_pool        the threads that move the bytes; system calls release the GIL
striping       which bytes lie in which file
striped_file   a range of bytes dealt out over the directories in stripes

All offsets are multiples of `ALIGNMENT` (4096 bytes), and so are all buffer addresses.
"""

from lohan_fx.runtime.ssd.io_pool import IoCounters, IoPool, OnSpan
from lohan_fx.runtime.ssd.run_directory import RunDirectory
from lohan_fx.runtime.ssd.striped_file import StripedFile
from lohan_fx.runtime.ssd.syscalls import Syscalls

__all__ = ["IoCounters", "IoPool", "OnSpan", "RunDirectory", "StripedFile", "Syscalls"]
