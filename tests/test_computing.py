"""The stream that compute runs on, as `Lanes.computing` keeps it (CUDA's calls are replaced)."""

from types import SimpleNamespace

import pytest
import torch

from lohan_fx.runtime.lanes import Lanes


def test_compute_inside_compute_on_another_device_does_not_use_the_outer_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes = Lanes(torch.device("cpu"))
    lanes._cuda = True
    stream = SimpleNamespace(device_index=0, query=lambda: True)
    current, changes = [0], []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", changes.append)
    try:
        with lanes.computing():
            assert lanes.stream is stream
            current[0] = 1
            with lanes.computing():
                assert lanes.stream is None
            assert not changes  # would make device 0 the current one
            current[0] = 0
    finally:
        lanes._cuda = False
        lanes.close()
