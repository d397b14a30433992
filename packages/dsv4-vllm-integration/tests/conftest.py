# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a plugin in the state of a fresh process, and a reason to skip where vLLM is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dsv4_vllm_integration import imports, plugin, states
from dsv4_vllm_integration.probe import version_obstacle, vllm_version


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    obstacle = version_obstacle(vllm_version())
    if not obstacle:
        return
    for item in items:
        if item.get_closest_marker("vllm") is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs the real vLLM: {obstacle}"))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    plugin.forget()
    states.forget()
    imports.forget()
