# SPDX-License-Identifier: Apache-2.0
"""One process group for the whole run; these tests are started by torchrun."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dsv4_symm_mem.communicator import ProcessGroupCommunicator
from dsv4_symm_mem.testing.processes import torchrun_group


@pytest.fixture(scope="session")
def group() -> Iterator[ProcessGroupCommunicator]:
    with torchrun_group() as opened:
        yield opened
