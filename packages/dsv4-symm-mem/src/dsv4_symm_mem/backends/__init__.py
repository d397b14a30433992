# SPDX-License-Identifier: Apache-2.0
"""Symmetric-memory back ends behind one protocol, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping

from dsv4_symm_mem.backends.base import Backend, BackendFactory, MappedMemory
from dsv4_symm_mem.backends.shared import SharedBackend
from dsv4_symm_mem.backends.torch import TorchBackend
from dsv4_symm_mem.backends.virtual import VirtualBackend, VirtualGroup, VirtualRank
from dsv4_symm_mem.communicator import Communicator

BACKENDS: Mapping[str, BackendFactory] = {
    "torch": TorchBackend,
    "virtual": VirtualBackend,
    "shared": SharedBackend,
}


def default_backend(communicator: Communicator) -> str:
    """Name of the back end that suits a group: by its kind and its device."""
    if isinstance(communicator, VirtualRank):
        return "virtual"
    return "torch" if communicator.device.type == "cuda" else "shared"


__all__ = [
    "BACKENDS",
    "Backend",
    "BackendFactory",
    "MappedMemory",
    "SharedBackend",
    "TorchBackend",
    "VirtualBackend",
    "VirtualGroup",
    "VirtualRank",
    "default_backend",
]
