# SPDX-License-Identifier: Apache-2.0
"""Run a few lines of PTX on one warp (or more) and get its registers back."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from dsv4_ptx_emulator.emulator import Emulator
from dsv4_ptx_emulator.machine.scheduler import Uneven
from numpy.typing import NDArray

HEADER = ".version 9.4\n.target {arch}\n.address_size 64\n"
FIRST_LINE = 12
"""Line of the text where a body begins, if `module` is empty."""

WIDTHS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


def kernel(body: str, *, arch: str = "sm_90a", module: str = "", params: int = 1, threads: int = 32) -> str:
    """A kernel `probe` with `params` 64-bit parameters p0, p1... and the usual registers declared."""
    parameters = ", ".join(f".param .u64 p{number}" for number in range(params))
    return (
        HEADER.format(arch=arch)
        + module
        + f"\n.visible .entry probe({parameters})\n.reqntid {threads}, 1, 1\n{{\n"
        + ".reg .pred %p<20>;\n.reg .b16 %h<20>;\n.reg .b32 %r<60>;\n.reg .b64 %d<60>;\n"
        + body
        + "\nret;\n}\n"
    )


def evaluate(
    body: str,
    inputs: Mapping[str, NDArray[Any]],
    outputs: Mapping[str, int],
    *,
    arch: str = "sm_90a",
    seed: int = 0,
) -> dict[str, NDArray[Any]]:
    """Registers after `body`, lane by lane.

    Args:
        body: Instructions between loading the inputs and storing the outputs.
        inputs: 32 unsigned values (uint8 to uint64) per register; loaded first.
        outputs: Bytes per register (1: a predicate) to be stored last.
        arch: Target.
        seed: Scheduler's seed.

    Returns:
        uint arrays of 32, bool for predicates.
    """
    rows = [np.ascontiguousarray(values) for values in inputs.values()]
    assert all(row.shape == (32,) for row in rows)
    results = {name: np.zeros(32, np.uint8 if size == 1 else f"u{size}") for name, size in outputs.items()}
    buffers = [*rows, *results.values()]
    lines = ["mov.u32 %r59, %laneid;"]
    for number, (name, row) in enumerate(zip(inputs, rows, strict=True)):
        size = row.dtype.itemsize
        lines += [
            f"ld.param.b64 %d58, [p{number}];",
            f"mad.wide.u32 %d59, %r59, {size}, %d58;",
            f"ld.global.{WIDTHS[size]} {name}, [%d59];",
        ]
    lines.append(body)
    for number, (name, size) in enumerate(outputs.items()):
        lines += [f"ld.param.b64 %d58, [p{len(rows) + number}];", f"mad.wide.u32 %d59, %r59, {size}, %d58;"]
        if size == 1:
            lines += [f"selp.b32 %r58, 1, 0, {name};", "st.global.u8 [%d59], %r58;"]
        else:
            lines.append(f"st.global.{WIDTHS[size]} [%d59], {name};")
    emulator = Emulator(arch, seed=seed)
    for buffer in buffers:
        emulator.register(buffer.ctypes.data, buffer.nbytes)
    text = kernel("\n".join(lines), arch=arch, params=len(buffers))
    parameters = b"".join(struct.pack("<Q", buffer.ctypes.data) for buffer in buffers)
    emulator.launch(text, "probe", grid=(1, 1, 1), block=(32, 1, 1), parameters=parameters)
    emulator.run()
    return {name: row.astype(np.bool_) if outputs[name] == 1 else row for name, row in results.items()}


def run(
    body: str,
    *buffers: NDArray[Any],
    threads: int = 32,
    grid: int = 1,
    cluster: int | None = None,
    shared: int = 0,
    arch: str = "sm_90a",
    module: str = "",
    seed: int = 0,
    max_steps: int = 1_000_000,
    uneven: Uneven = Uneven.NOBODY,
) -> Emulator:
    """Launch `body` with the buffers' addresses as p0, p1... and run it."""
    emulator = Emulator(arch, seed=seed, max_steps=max_steps, uneven=uneven)
    for number, buffer in enumerate(buffers):
        emulator.register(buffer.ctypes.data, buffer.nbytes, f"buffer {number}")
    text = kernel(body, arch=arch, module=module, params=max(len(buffers), 1), threads=threads)
    parameters = b"".join(struct.pack("<Q", buffer.ctypes.data) for buffer in buffers) or bytes(8)
    emulator.launch(
        text,
        "probe",
        grid=(grid, 1, 1),
        block=(threads, 1, 1),
        cluster=(cluster, 1, 1) if cluster else None,
        shared_bytes=shared,
        parameters=parameters,
    )
    emulator.run()
    return emulator
