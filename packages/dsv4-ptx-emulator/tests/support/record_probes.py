# SPDX-License-Identifier: Apache-2.0
"""Run probes on a GPU and keep what comes out: `python record_probes.py data/core_probes.json`.

The file's name says which: async_probes.json or core_probes.json. All results go into a file beside it that
ends in .raw.npz, for looking into differences later; it is no fixture.

Needs an sm_90a GPU with its driver and nothing else: the driver API is called through ctypes. The driver's
compiler knows older PTX than the DSL writes, so the texts' version is lowered; nothing in them is newer than
PTX 8.6.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import core_probes
import numpy as np
from async_probes import (
    CONVERSIONS,
    MATRICES,
    MOVES,
    SUMS,
    TENSORS,
    Bytes,
    MapOf,
    Probe,
    emulate,
    fingerprint,
)
from core_rows import integers
from dsv4_ptx_emulator.errors import EmulatorError

VERSION = ".version 8.6"
PACKAGES = ("torch", "nvidia-cutlass-dsl")
"""Named in the recording if they are installed. They have no part in it: the driver compiles the probes."""
HANGS_AFTER = 20.0
"""Seconds that a probe may take; all of them take less than one, their compilation included."""


class Suite:
    """The probes of the asynchronous groups, and the names of their results.

    Attributes:
        probes: In the order in which they are run.
    """

    probes: Sequence[Probe] = (*MOVES, *TENSORS, *MATRICES, *SUMS, *CONVERSIONS)

    def named(self, number: int, measured: Sequence[Bytes]) -> dict[str, Bytes]:
        """The results of probe `number` that are kept."""
        probe = self.probes[number]
        given = [buffer for buffer in probe.buffers if not isinstance(buffer, MapOf)]
        return {
            f"{probe.name}/{at}/{fingerprint(probe)}": after
            for at, (before, after) in enumerate(zip(given, measured, strict=True))
            if not np.array_equal(before, after) or at + 1 == len(given)
        }

    def differences(self, number: int, measured: Sequence[Bytes], emulated: Sequence[Bytes]) -> Iterator[str]:
        """Where a GPU's results and the emulator's differ."""
        for at, (left, right) in enumerate(zip(measured, emulated, strict=True)):
            wrong = np.flatnonzero(left != right)
            if len(wrong):
                some = wrong[:8]
                yield (
                    f"{self.probes[number].name}: buffer {at}: {len(wrong)} bytes differ, at "
                    f"{some.tolist()}: "
                    f"{left[some].tolist()} on the GPU, {right[some].tolist()} here"
                )

    def keep(self, path: Path, recorded: Mapping[str, Bytes], about: Mapping[str, str]) -> None:
        """Write what came out, by "probe/number of the buffer/fingerprint of the probe"."""
        hashes = {name: hashlib.sha256(data.tobytes()).hexdigest() for name, data in recorded.items()}
        path.write_text(json.dumps(hashes, indent=0, sort_keys=True) + "\n")
        sums = {
            name.split("/")[0]: data
            for name, data in recorded.items()
            if name.startswith("sum-") and "/1/" in name
        }
        np.savez_compressed(path.with_name("async_sums.npz"), **sums)  # type: ignore[arg-type]


class CoreSuite(Suite):
    """The groups of synchronous instructions: results by row."""

    def __init__(self) -> None:
        self.probes = [group.probe() for group in core_probes.GROUPS]

    def named(self, number: int, measured: Sequence[Bytes]) -> dict[str, Bytes]:
        """See `Suite`."""
        group = core_probes.GROUPS[number]
        rows = group.split(measured[-1])
        return {group.key(row): rows[row.name] for row in group.rows}

    def differences(self, number: int, measured: Sequence[Bytes], emulated: Sequence[Bytes]) -> Iterator[str]:
        """See `Suite`."""
        group = core_probes.GROUPS[number]
        there, here = group.split(measured[-1]), group.split(emulated[-1])
        for row in group.rows:
            emulated_row = core_probes.departed(group, row, here[row.name])
            wrong = np.flatnonzero(core_probes.apart(group, row, emulated_row, there[row.name]))
            if not len(wrong):
                continue
            gpu, cpu = integers(there[row.name], row.size), integers(emulated_row, row.size)
            yield f"{group.name}/{row.name}: {len(wrong)} of {group.count} threads differ"
            for thread in wrong[:4].tolist():
                operands = " ".join(f"{int(values[thread]):#x}" for values in group.inputs)
                yield f"    {operands}: {gpu[thread]:#x} on the GPU, {cpu[thread]:#x} here"

    def keep(self, path: Path, recorded: Mapping[str, Bytes], about: Mapping[str, str]) -> None:
        """See `Suite`."""
        core_probes.save(path, recorded, about)


def suite_of(path: Path) -> Suite:
    """The probes that are recorded in a file of this name."""
    suites = {"async_probes": Suite, "core_probes": CoreSuite}
    if path.stem not in suites:
        raise SystemExit(f"{path.name}: expected {' or '.join(f'{name}.json' for name in suites)}")
    return suites[path.stem]()


def driver_version() -> str:
    """The driver's own version, which the driver API does not tell: that of its compiler."""
    management = ctypes.CDLL("libnvidia-ml.so.1")
    version = ctypes.create_string_buffer(80)
    codes = (management.nvmlInit_v2(), management.nvmlSystemGetDriverVersion(version, len(version)))
    management.nvmlShutdown()
    if any(codes):
        raise RuntimeError(f"NVML errors {codes}")
    return version.value.decode()


class Gpu:
    """The first GPU."""

    def __init__(self) -> None:
        self.cuda: Any = ctypes.CDLL("libcuda.so.1")
        self.check(self.cuda.cuInit(0))
        context = ctypes.c_void_p()
        self.check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self.check(self.cuda.cuCtxSetCurrent(context))

    def about(self) -> dict[str, str]:
        """What GPU and driver this is, the driver's CUDA version, and versions of installed packages."""
        name, version = ctypes.create_string_buffer(128), ctypes.c_int()
        self.check(self.cuda.cuDeviceGetName(name, 128, 0))
        self.check(self.cuda.cuDriverGetVersion(ctypes.byref(version)))
        packages = {}
        for package in PACKAGES:
            with contextlib.suppress(PackageNotFoundError):
                packages[package] = package_version(package)
        return {
            "gpu": name.value.decode(),
            "driver": driver_version(),
            "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
            **packages,
        }

    def check(self, code: int) -> None:
        """Raise for an error code."""
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"CUDA error {code}: {(text.value or b'').decode()}")

    def load(self, text: str) -> ctypes.c_void_p:
        """The kernel `probe` of a PTX text."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        log = ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        code = self.cuda.cuModuleLoadDataEx(ctypes.byref(module), text.encode() + b"\0", 2, options, values)
        if code:
            raise RuntimeError(f"CUDA error {code}: {log.value.decode()}")
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), module, b"probe"))
        return function

    def run(self, probe: Probe) -> list[Bytes]:
        """What is in the buffers (not the maps) after the launch."""
        function = self.load(probe.text.replace(".version 9.4", VERSION, 1))
        places = [self._allocate(128 if isinstance(b, MapOf) else b.nbytes) for b in probe.buffers]
        for place, buffer in zip(places, probe.buffers, strict=True):
            if isinstance(buffer, MapOf):
                data = self._map(buffer, places[buffer.buffer].value)
            else:
                data = buffer.tobytes()
            self.check(self.cuda.cuMemcpyHtoD_v2(place, data, ctypes.c_size_t(len(data))))
        if probe.shared:
            self.check(self.cuda.cuFuncSetAttribute(function, 8, probe.shared))
        self._launch(function, probe, places)
        results = []
        for place, buffer in zip(places, probe.buffers, strict=True):
            if not isinstance(buffer, MapOf):
                result = np.zeros(buffer.nbytes, np.uint8)
                size = ctypes.c_size_t(buffer.nbytes)
                self.check(self.cuda.cuMemcpyDtoH_v2(ctypes.c_void_p(result.ctypes.data), place, size))
                results.append(result)
        for place in places:
            self.cuda.cuMemFree_v2(place)
        return results

    def _allocate(self, size: int) -> ctypes.c_uint64:
        place = ctypes.c_uint64()
        self.check(self.cuda.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(size)))
        return place

    def _map(self, wanted: MapOf, address: int) -> bytes:
        """The driver's tensor map."""
        tensor = wanted.tensor
        rank = tensor.rank
        place = (ctypes.c_uint8 * 192)()
        start = -ctypes.addressof(place) % 64
        types = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16")
        self.check(
            self.cuda.cuTensorMapEncodeTiled(
                ctypes.c_void_p(ctypes.addressof(place) + start),
                types.index(tensor.element),
                rank,
                ctypes.c_void_p(address + tensor.address),
                (ctypes.c_uint64 * rank)(*tensor.sizes),
                (ctypes.c_uint64 * rank)(*tensor.strides[1:]),
                (ctypes.c_uint32 * rank)(*tensor.box),
                (ctypes.c_uint32 * rank)(*[1] * rank),
                0,
                tensor.swizzle.bits,
                (0, 64, 128, 256).index(tensor.promotion),
                int(tensor.nan_fill),
            )
        )
        return bytes(place[start : start + 128])

    def _launch(self, function: ctypes.c_void_p, probe: Probe, places: Sequence[ctypes.c_uint64]) -> None:
        pointers = (ctypes.c_void_p * len(places))(*(ctypes.addressof(place) for place in places))

        class Attribute(ctypes.Structure):
            _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))

        class Config(ctypes.Structure):
            _fields_ = (
                ("grid", ctypes.c_uint * 3),
                ("block", ctypes.c_uint * 3),
                ("shared", ctypes.c_uint),
                ("stream", ctypes.c_void_p),
                ("attributes", ctypes.POINTER(Attribute)),
                ("count", ctypes.c_uint),
            )

        cluster = Attribute(4, 0, (ctypes.c_uint32 * 16)(probe.cluster, 1, 1))  # CLUSTER_DIMENSION
        config = Config(
            (ctypes.c_uint * 3)(probe.grid, 1, 1),
            (ctypes.c_uint * 3)(probe.threads, 1, 1),
            probe.shared,
            None,
            ctypes.pointer(cluster),
            int(probe.cluster > 1),
        )
        self.check(self.cuda.cuLaunchKernelEx(ctypes.byref(config), function, pointers, None))
        self.check(self.cuda.cuCtxSynchronize())


def record(first: int, path: Path) -> None:
    """Run the probes from number `first` on, and say where the emulator differs."""
    suite, gpu = suite_of(path), Gpu()
    for number, probe in enumerate(suite.probes):
        if number < first:
            continue
        path.with_suffix(".next").write_text(str(number + 1))
        # A kernel that never ends can only be left by ending the process.
        limit = threading.Timer(HANGS_AFTER, os._exit, (1,))
        limit.daemon = True
        limit.start()
        measured = gpu.run(probe)
        limit.cancel()
        np.savez(path.with_name(f"{path.stem}-{number}.npz"), **suite.named(number, measured))  # type: ignore[arg-type]
        try:
            emulated = emulate(probe)
        except EmulatorError as error:
            print(f"{probe.name}: {error}")
            continue
        for line in suite.differences(number, measured, emulated):
            print(line, flush=True)
    path.with_suffix(".next").write_text(str(len(suite.probes)))


def main(path: Path) -> None:
    """Record every probe; one that breaks the GPU's context is left out and the rest goes on without it."""
    suite, about = suite_of(path), Gpu().about()
    position = path.with_suffix(".next")
    position.write_text("0")
    while (first := int(position.read_text())) < len(suite.probes):
        done = subprocess.run(
            [sys.executable, __file__, str(path), str(first)], check=False, capture_output=True
        )
        print(done.stdout.decode(), end="")
        if done.returncode:
            reached = int(position.read_text())
            lines = done.stderr.decode().splitlines() or [f"nothing after {HANGS_AFTER} s"]
            print(f"{suite.probes[max(reached, 1) - 1].name}: {lines[-1]}", flush=True)
            position.write_text(str(max(reached, first + 1)))
    recorded: dict[str, Bytes] = {}
    for number in range(len(suite.probes)):
        part = path.with_name(f"{path.stem}-{number}.npz")
        if part.exists():
            recorded |= dict(np.load(part))
            part.unlink()
    position.unlink()
    np.savez_compressed(path.with_suffix(".raw.npz"), **recorded)  # type: ignore[arg-type]
    suite.keep(path, recorded, about)
    print(f"{len(recorded)} results recorded in {path}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        record(int(sys.argv[2]), Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]))
