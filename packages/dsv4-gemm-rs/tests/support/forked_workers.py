# SPDX-License-Identifier: Apache-2.0
"""Makes PyTorch fit for the forked workers of mutation runs; modules of scenarios import it for that.

Workers run side by side, one thread each. In a forked one PyTorch renews its pool of threads at first use,
which must not be by several threads at once.
"""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
