"""One computing thread per test process: two that wait for each other on a shared machine stand still together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hpu_engine.device.cpu.native.build import default_cache, load_library
from hpu_engine.device.cpu.native.tile_ops import TileOps, has_tiles

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tile_ops() -> TileOps:
    library = load_library(default_cache(), pytest.fail)
    if not has_tiles(library):
        pytest.skip("this processor has no AMX tiles for bfloat16")
    return TileOps(library)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
