# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory for fused multi-GPU kernels: arena, probe, exchange protocol, device-side helpers.

Importing this package needs no GPU and no driver, and does not import the CuTe DSL; only `device` and the
compiled collectives do.
"""

from __future__ import annotations

from dsv4_symm_mem._version import __version__
from dsv4_symm_mem.arena import SymmetricArena, SymmetricTensor
from dsv4_symm_mem.backends import VirtualGroup, VirtualRank
from dsv4_symm_mem.communicator import Communicator, ProcessGroupCommunicator
from dsv4_symm_mem.errors import (
    ArgumentError,
    CallMismatchError,
    ClosedError,
    Dsv4Error,
    ExchangeError,
    GroupError,
    MismatchError,
    PeerAbortError,
    PeerTimeoutError,
    StaleWeightError,
    UnsupportedError,
)
from dsv4_symm_mem.probe import DeviceProbe, GroupProbe, probe, probe_device

__all__ = [
    "ArgumentError",
    "CallMismatchError",
    "ClosedError",
    "Communicator",
    "DeviceProbe",
    "Dsv4Error",
    "ExchangeError",
    "GroupError",
    "GroupProbe",
    "MismatchError",
    "PeerAbortError",
    "PeerTimeoutError",
    "ProcessGroupCommunicator",
    "StaleWeightError",
    "SymmetricArena",
    "SymmetricTensor",
    "UnsupportedError",
    "VirtualGroup",
    "VirtualRank",
    "__version__",
    "probe",
    "probe_device",
]
