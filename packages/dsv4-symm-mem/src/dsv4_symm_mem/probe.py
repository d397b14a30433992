# SPDX-License-Identifier: Apache-2.0
"""What a machine and a group offer, and what stands in the way, in a form people and programs can read.

`probe_device` is local, `probe` adds what only the group knows. Neither raises for a missing capability:
each absence is reported with its reason, since the point is to explain a fallback.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from dsv4_symm_mem.backends import default_backend
from dsv4_symm_mem.backends.torch import multicast_obstacle
from dsv4_symm_mem.communicator import Communicator, ProcessGroupCommunicator, communicator_of

SWITCHES: Mapping[str, str] = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "torch makes no multicast mapping",
    "TORCH_SYMMMEM": "selects torch's symmetric-memory back end",
    "NCCL_NVLS_ENABLE": "NCCL's NVLink SHARP; 0 turns it off",
    "NCCL_P2P_DISABLE": "NCCL uses no peer-to-peer access",
    "NVSHMEM_DISABLE_NVLS": "NVSHMEM uses no multicast",
    "CUDA_VISIBLE_DEVICES": "hides devices from this process",
    "CUDA_DEVICE_MAX_CONNECTIONS": "hardware queues; 16 or more virtual ranks on a GPU need 32",
    "CUDA_LAUNCH_BLOCKING": "serialises launches: kernels that wait for each other deadlock",
    "DSV4_GEMM_RS_PATH": "forces a path of gemm_rs",
    "DSV4_GEMM_RS_TABLE": "the user's own thresholds for gemm_rs; off for none",
    "DSV4_CACHE_DIR": "where compiled kernels are kept; off for nowhere",
}
"""Environment switches that change or turn off what the packages use, with their effect."""

_PACKAGES = (
    "torch",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "flashinfer-python",
    "triton",
    "nvidia-nccl-cu13",
)


@dataclass(frozen=True)
class DeviceProbe:
    """One rank's device and software.

    Attributes:
        device: Torch's name for the device.
        name: The product's name, or the processor's for a CPU.
        arch: Compute capability as 10 * major + minor (90 for Hopper), or None on a CPU.
        multiprocessors: Number of SMs, or None on a CPU.
        memory_bytes: Device memory, or None on a CPU.
        driver: NVIDIA driver version, or why it is unknown.
        cuda: CUDA version torch was built for, or None.
        multicast: Whether the device supports multicast mappings.
        multicast_reason: Why not; empty when it does.
        versions: Versions of the packages that matter, by name; absent ones are left out.
        switches: Environment switches that are set, by name.
    """

    device: str
    name: str
    arch: int | None
    multiprocessors: int | None
    memory_bytes: int | None
    driver: str
    cuda: str | None
    multicast: bool
    multicast_reason: str
    versions: Mapping[str, str]
    switches: Mapping[str, str]


@dataclass(frozen=True)
class GroupProbe:
    """What a group of ranks offers.

    Attributes:
        rank: The reporting rank.
        devices: Every rank's device, in rank order.
        backend: The symmetric-memory back end that suits the group.
        links: For each pair (i, j) of ranks how rank i reaches rank j's memory: "self", "same device",
            "NVLink", "peer access without NVLink", or why it cannot.
    """

    rank: int
    devices: tuple[DeviceProbe, ...]
    backend: str
    links: tuple[tuple[str, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries and lists, ready for JSON."""
        return asdict(self)


def probe_device(device: torch.device | str) -> DeviceProbe:
    """Describe `device` and this process's software; local, does not raise for what is missing."""
    where = torch.device(device)
    versions = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    switches = {name: os.environ[name] for name in SWITCHES if name in os.environ}
    obstacle = multicast_obstacle(where)
    if where.type != "cuda":
        return DeviceProbe(
            device=str(where),
            name=platform.processor() or platform.machine(),
            arch=None,
            multiprocessors=None,
            memory_bytes=None,
            driver=driver_version(),
            cuda=torch.version.cuda,
            multicast=False,
            multicast_reason=obstacle,
            versions=versions,
            switches=switches,
        )
    properties = torch.cuda.get_device_properties(where)
    return DeviceProbe(
        device=str(where),
        name=properties.name,
        arch=10 * properties.major + properties.minor,
        multiprocessors=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        driver=driver_version(),
        cuda=torch.version.cuda,
        multicast=not obstacle,
        multicast_reason=obstacle,
        versions=versions,
        switches=switches,
    )


def probe(group: Communicator | dist.ProcessGroup, device: torch.device | str | None = None) -> GroupProbe:
    """Describe every rank of `group` and how each reaches the others; collective.

    Raises:
        ArgumentError: `group` is none of the accepted kinds.
    """
    communicator = communicator_of(group, device)
    gathered = communicator.all_gather((probe_device(communicator.device), _bus_id(communicator.device)))
    buses = [bus for _, bus in gathered]
    links = communicator.all_gather(
        tuple(_link(communicator, peer, buses) for peer in range(communicator.size))
    )
    return GroupProbe(
        rank=communicator.rank,
        devices=tuple(described for described, _ in gathered),
        backend=default_backend(communicator),
        links=tuple(links),
    )


def driver_version() -> str:
    """Version of the NVIDIA driver, or why it is unknown."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:
        return f"unknown ({error})"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _bus_id(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    return f"{domain:08x}:{bus:02x}:{slot:02x}.0"


def _link(communicator: Communicator, peer: int, buses: list[str | None]) -> str:
    mine, theirs = buses[communicator.rank], buses[peer]
    if peer == communicator.rank:
        return "self"
    if not isinstance(communicator, ProcessGroupCommunicator) or (mine is not None and mine == theirs):
        return "same device"
    if mine is None or theirs is None:
        return "host memory"
    return nvlink_status(mine, theirs)


def nvlink_status(bus_id: str, peer_bus_id: str) -> str:
    """How the device at one PCI bus id reaches the one at the other, by the driver's own account (NVML)."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            mine, theirs = (pynvml.nvmlDeviceGetHandleByPciBusId(bus) for bus in (bus_id, peer_bus_id))
            linked = pynvml.nvmlDeviceGetP2PStatus(mine, theirs, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
            if linked == pynvml.NVML_P2P_STATUS_OK:
                return "NVLink"
            readable = pynvml.nvmlDeviceGetP2PStatus(mine, theirs, pynvml.NVML_P2P_CAPS_INDEX_WRITE)
            return (
                "peer access without NVLink"
                if readable == pynvml.NVML_P2P_STATUS_OK
                else f"no peer access (NVML status {readable})"
            )
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:
        return f"unknown ({error})"
