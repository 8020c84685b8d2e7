"""One computing thread per test process: two that wait for each other on a shared machine stand still together."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
