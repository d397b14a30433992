# SPDX-License-Identifier: Apache-2.0
"""The probe reports what is missing with its reason and never raises for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.probe import nvlink_status, probe, probe_device


def test_a_cpu_group_is_described_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    described = VirtualGroup(3).run(probe)
    assert [d.rank for d in described] == [0, 1, 2]
    first = described[0]
    assert first.backend == "virtual"
    assert first.links == tuple(
        tuple("self" if i == j else "same device" for j in range(3)) for i in range(3)
    )
    device = first.devices[0]
    assert device.arch is None
    assert not device.multicast
    assert device.multicast_reason
    assert device.versions["torch"] == torch.__version__
    assert device.switches["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert json.loads(json.dumps(first.as_dict()))["devices"][2]["device"] == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without an NVIDIA driver")
def test_without_a_driver_the_reason_is_given() -> None:
    assert probe_device("cpu").driver.startswith("unknown (")
    assert nvlink_status("0000:00:00.0", "0000:01:00.0").startswith("unknown (")


# ruff: noqa: N802 - the names are NVML's
class FakeNvml:
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_CAPS_INDEX_WRITE, NVML_P2P_STATUS_OK = 2, 1, 0

    def __init__(self, nvlink: int, write: int) -> None:
        self.status = {self.NVML_P2P_CAPS_INDEX_NVLINK: nvlink, self.NVML_P2P_CAPS_INDEX_WRITE: write}

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> str:
        return bus

    def nvmlDeviceGetP2PStatus(self, a: str, b: str, index: int) -> int:
        return self.status[index]


@pytest.mark.parametrize(
    ("nvlink", "write", "text"),
    [(0, 0, "NVLink"), (5, 0, "peer access without NVLink"), (5, 1, "no peer access (NVML status 1)")],
)
def test_links_are_named_from_the_drivers_answers(
    nvlink: int, write: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake: Any = FakeNvml(nvlink, write)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake)
    assert nvlink_status("a", "b") == text
