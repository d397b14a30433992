# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels run in the PTX emulator, with the arguments that a GPU launch would get.

TileLang's host code is not run: grid, cluster and shared memory are read from the kernel and its source, and
positional arguments are matched to the device function's parameters by name.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

ENTRY = re.compile(r'extern "C" __global__ void __launch_bounds__\((\d+), \d+\) (\w+)\(([^)]*)\) \{')


@cache
def ptx_of(source: str, arch: str) -> str:
    """The PTX that nvcc makes of a generated source."""
    import tilelang

    root = Path(os.path.dirname(tilelang.__file__))
    includes = [f"-I{root / 'src'}", f"-I{root / '3rdparty' / 'cutlass' / 'include'}"]
    with tempfile.TemporaryDirectory() as folder:
        unit, result = Path(folder, "kernel.cu"), Path(folder, "kernel.ptx")
        unit.write_text(source, encoding="utf-8")
        flags = ["-w", "-std=c++20", f"-arch={arch}", "-DENABLE_BF16", "-ptx"]
        subprocess.run(["nvcc", *flags, *includes, str(unit), "-o", str(result)], check=True)
        return result.read_text(encoding="utf-8")


class EmulatedKernel:
    """Stands for a compiled kernel; called like one, with host tensors."""

    def __init__(
        self,
        compiled: Any,
        *,
        cluster: int = 1,
        rows: int = 1,
        columns: int = 1,
        arch: str = "sm_90a",
        seed: int = 0,
    ) -> None:
        self.columns = columns
        self.source = compiled.get_kernel_source()
        self.names = [parameter.name for parameter in compiled.prim_func.params]
        self.buffers = [
            compiled.prim_func.buffer_map[parameter].name
            if parameter in compiled.prim_func.buffer_map
            else None
            for parameter in compiled.prim_func.params
        ]
        host = compiled.get_host_source()
        self.shared = int(re.findall(r"v_int64\) = \(\(int64_t\)(\d+)\)", host)[-1])
        self.cluster, self.rows, self.arch, self.seed = cluster, rows, arch, seed
        self.steps = 0

    def __call__(self, *arguments: Any) -> None:
        from dsv4_ptx_emulator.emulator import MEMORY_MODEL, Emulator

        values = {
            (buffer or name): value
            for name, buffer, value in zip(self.names, self.buffers, arguments, strict=True)
        }
        tokens = arguments[0].shape[0]
        values.setdefault("tokens", tokens)
        match = ENTRY.search(self.source)
        assert match is not None
        emulator = Emulator(self.arch, seed=self.seed, checks=MEMORY_MODEL)
        declared_names = [declared.split()[-1].lstrip("*") for declared in match[3].split(",")]
        # TileLang may rename a scalar after the parameter of a macro that it is passed to.
        renamed = [name for name in declared_names if name not in values]
        unused = [
            name for name, value in values.items() if isinstance(value, float) and name not in declared_names
        ]
        values.update(
            {name: values[old] for name, old in zip(renamed, unused, strict=True)} if renamed else {}
        )
        block = b""
        seen: set[int] = set()
        for declared in match[3].split(","):
            name = declared.split()[-1].lstrip("*")
            value = values[name]
            if isinstance(value, torch.Tensor):
                block += bytes(-len(block) % 8) + struct.pack("<Q", value.data_ptr())
                if value.data_ptr() not in seen:
                    seen.add(value.data_ptr())
                    emulator.register(value.data_ptr(), value.numel() * value.element_size(), name)
            else:
                block += bytes(-len(block) % 4) + struct.pack("<f" if "float" in declared else "<i", value)
        emulator.launch(
            ptx_of(self.source, self.arch),
            match[2],
            grid=(-(-tokens // self.rows) * self.cluster, self.columns, 1),
            block=(int(match[1]), 1, 1),
            cluster=(self.cluster, 1, 1) if self.cluster > 1 else None,
            shared_bytes=self.shared,
            parameters=block,
        )
        emulator.run()
        self.steps = emulator.steps
