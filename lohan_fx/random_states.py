"""States of the random generators of this process, for a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Those of torch, its CUDA devices, Python and numpy."""
    version, numbers, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    state = dict(numpy["state"])
    if "key" in state:
        state["key"] = torch.from_numpy(state["key"].astype(np.int64))
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": {**numpy, "state": state},
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Take over what `random_states` returned, of CUDA devices as far as there are any."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    numpy = dict(states["numpy"])
    if "key" in numpy["state"]:
        numpy["state"] = {**numpy["state"], "key": numpy["state"]["key"].numpy().astype(np.uint32)}
    np.random.set_state(numpy)
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
            torch.cuda.set_rng_state(state, device)
