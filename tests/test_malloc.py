"""Freed CPU tensors leave the process: without it, a device budget on a CPU would mean little."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lohan_fx.runtime.malloc import return_freed_memory

# Every second of many tensors dies, as in a training step, after glibc has seen larger ones die.
# How much it keeps of those differs from run to run, so memory is read before them.
_PROGRAM = """
import os, sys, torch
from lohan_fx.runtime.malloc import return_freed_memory

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if sys.argv[1] == "on":
    assert return_freed_memory()
torch.ones(2**20)
before = resident_bytes()
for _ in range(4):
    torch.ones(7 * 2**20)
tensors = [torch.ones(2**20) for _ in range(64)]
kept = tensors[1::2]
del tensors
print(resident_bytes() - before)
"""


def growth_bytes(setting: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, setting]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run(command, capture_output=True, check=True, env=environment, timeout=120)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_tensors_leave_the_process() -> None:
    kept_bytes = 32 * 4 * 2**20
    assert growth_bytes("on") == pytest.approx(kept_bytes, abs=4 * 2**20)
    assert growth_bytes("off") > 1.5 * kept_bytes  # what the setting is for


def test_the_users_own_limit_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert not return_freed_memory()
