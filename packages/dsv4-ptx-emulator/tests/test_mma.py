# SPDX-License-Identifier: Apache-2.0
"""mma.sync against a matrix product, its fragments put together element by element."""

from __future__ import annotations

import numpy as np
import pytest
from dsv4_ptx_emulator.errors import UnsupportedInstruction
from probe import run

SETUP = """
mov.u32 %r2, %tid.x;
ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1];
mad.wide.u32 %d2, %r2, 48, %d0; mad.wide.u32 %d3, %r2, 16, %d1;
ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%d2];
ld.global.v2.b32 {%r14, %r15}, [%d2+16];
ld.global.v4.b32 {%r16, %r17, %r18, %r19}, [%d2+32];
"""
REGISTERS = "{%r16, %r17, %r18, %r19}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r16, %r17, %r18, %r19}"


def test_product_of_bf16() -> None:
    """Small integers, which no order of the sum could round."""
    generator = np.random.default_rng(0)
    a, b = (generator.integers(-8, 9, shape).astype(np.float32) for shape in ((16, 16), (16, 8)))
    c = generator.integers(-99, 100, (16, 8)).astype(np.float32)
    held = np.zeros((32, 12), np.uint32)

    def pair(low: np.float32, high: np.float32) -> int:
        return int(low.view(np.uint32)) >> 16 | int(high.view(np.uint32)) & 0xFFFF0000

    for lane in range(32):
        group, member = lane // 4, lane % 4
        for i in range(4):
            row, k = group + 8 * (i % 2), 2 * member + 8 * (i // 2)
            held[lane, i] = pair(a[row, k], a[row, k + 1])
        for i in range(2):
            held[lane, 4 + i] = pair(b[2 * member + 8 * i, group], b[2 * member + 8 * i + 1, group])
        for i in range(4):
            held[lane, 8 + i] = c[group + 8 * (i // 2), 2 * member + i % 2].view(np.uint32)
    out = np.zeros((32, 4), np.float32)
    form = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    body = f"{SETUP}{form} {REGISTERS};\nst.global.v4.b32 [%d3], {{%r16, %r17, %r18, %r19}};\n"
    run(body, held.view(np.uint8).reshape(-1), out.view(np.uint8).reshape(-1))
    wanted = a @ b + c
    for lane in range(32):
        for i in range(4):
            assert out[lane, i] == wanted[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]


def test_other_forms_are_refused() -> None:
    body = SETUP + f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {REGISTERS};\n"
    with pytest.raises(UnsupportedInstruction):
        run(body, np.zeros(32 * 48, np.uint8), np.zeros(32 * 16, np.uint8))
