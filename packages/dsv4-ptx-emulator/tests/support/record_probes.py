# SPDX-License-Identifier: Apache-2.0
"""Run the probes on a GPU and keep what comes out: `python record_probes.py data/async_probes.json`.

Needs an sm_90a GPU with its driver and nothing else: the driver API is called through ctypes. The driver's
compiler knows older PTX than the DSL writes, so the texts' version is lowered; nothing in them is newer than
PTX 8.6.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from dsv4_ptx_emulator.errors import EmulatorError

VERSION = ".version 8.6"
PROBES = (*MOVES, *TENSORS, *MATRICES, *SUMS, *CONVERSIONS)


class Gpu:
    """The first GPU."""

    def __init__(self) -> None:
        self.cuda: Any = ctypes.CDLL("libcuda.so.1")
        self.check(self.cuda.cuInit(0))
        context = ctypes.c_void_p()
        self.check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self.check(self.cuda.cuCtxSetCurrent(context))

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
    gpu = Gpu()
    for number, probe in enumerate(PROBES):
        if number < first:
            continue
        path.with_suffix(".next").write_text(str(number + 1))
        measured = gpu.run(probe)
        given = [buffer for buffer in probe.buffers if not isinstance(buffer, MapOf)]
        changed = {
            f"{probe.name}/{at}/{fingerprint(probe)}": after
            for at, (before, after) in enumerate(zip(given, measured, strict=True))
            if not np.array_equal(before, after) or at + 1 == len(given)
        }
        np.savez_compressed(path.with_name(f"part-{number}.npz"), **changed)  # type: ignore[arg-type]
        try:
            emulated = emulate(probe)
        except EmulatorError as error:
            print(f"{probe.name}: {error}")
            continue
        for at, (left, right) in enumerate(zip(measured, emulated, strict=True)):
            wrong = np.flatnonzero(left != right)
            if len(wrong):
                some = wrong[:8]
                print(
                    f"{probe.name}: buffer {at}: {len(wrong)} bytes differ, at {some.tolist()}: "
                    f"{left[some].tolist()} on the GPU, {right[some].tolist()} here",
                    flush=True,
                )
    path.with_suffix(".next").write_text(str(len(PROBES)))


def main(path: Path) -> None:
    """Record every probe; one that breaks the GPU's context is left out and the rest goes on without it."""
    position = path.with_suffix(".next")
    position.write_text("0")
    while (first := int(position.read_text())) < len(PROBES):
        done = subprocess.run(
            [sys.executable, __file__, str(path), str(first)], check=False, capture_output=True
        )
        print(done.stdout.decode(), end="")
        if done.returncode:
            print(f"{PROBES[int(position.read_text()) - 1].name}: {done.stderr.decode().splitlines()[-1]}")
    recorded: dict[str, Bytes] = {}
    for number in range(len(PROBES)):
        part = path.with_name(f"part-{number}.npz")
        if part.exists():
            recorded |= dict(np.load(part))
            part.unlink()
    position.unlink()
    keep(path, recorded)
    print(f"{len(recorded)} buffers recorded")


def keep(path: Path, recorded: Mapping[str, Bytes]) -> None:
    """Write what came out, by "probe/number of the buffer/fingerprint of the probe"."""
    hashes = {name: hashlib.sha256(data.tobytes()).hexdigest() for name, data in recorded.items()}
    path.write_text(json.dumps(hashes, indent=0, sort_keys=True) + "\n")
    sums = {
        name.split("/")[0]: data
        for name, data in recorded.items()
        if name.startswith("sum-") and "/1/" in name
    }
    np.savez_compressed(path.with_name("async_sums.npz"), **sums)  # type: ignore[arg-type]


if __name__ == "__main__":
    if len(sys.argv) > 2:
        record(int(sys.argv[2]), Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]))
