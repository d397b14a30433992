# SPDX-License-Identifier: Apache-2.0
"""ldmatrix and stmatrix against their definition, lane by lane."""

from __future__ import annotations

import numpy as np
import pytest
from dsv4_ptx_emulator.errors import MisalignedError, UnsupportedInstruction
from numpy.typing import NDArray
from probe import run

SETUP = """
.shared .align 128 .b8 data[512];
mov.u32 %r1, data; mov.u32 %r2, %tid.x;
ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1];
mad.wide.u32 %d2, %r2, 16, %d0; mad.wide.u32 %d3, %r2, 16, %d1;
"""


def fragment(matrix: NDArray[np.uint16], lane: int) -> int:
    """What a lane holds of an 8 x 8 matrix."""
    row, column = lane // 4, lane % 4 * 2
    return int(matrix[row, column]) | int(matrix[row, column + 1]) << 16


def regs(count: int) -> str:
    return "{" + ", ".join(f"%r{10 + i}" for i in range(count)) + "}"


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix(count: int, trans: str) -> None:
    """Rows are taken from where the lanes say: here in reverse order of memory."""
    source = np.random.default_rng(count).integers(0, 1 << 16, (32, 8), dtype=np.uint16)
    out = np.zeros((32, 4), np.uint32)
    stores = "\n".join(f"st.global.b32 [%d3+{4 * i}], %r{10 + i};" for i in range(count))
    body = (
        SETUP
        + """
    ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%d2];
    mad.lo.u32 %r3, %r2, 16, %r1;
    st.shared.v4.b32 [%r3], {%r20, %r21, %r22, %r23};
    bar.warp.sync 0xffffffff;
    sub.u32 %r4, 31, %r2; mad.lo.u32 %r4, %r4, 16, %r1;
    """
        + f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {regs(count)}, [%r4];\n"
        + stores
    )
    run(body, source.view(np.uint8).reshape(-1), out.view(np.uint8).reshape(-1))
    for i in range(count):
        matrix = source[::-1][8 * i : 8 * i + 8]
        matrix = matrix.T if trans else matrix
        assert out[:, i].tolist() == [fragment(matrix, lane) for lane in range(32)]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix(count: int, trans: str) -> None:
    matrices = np.random.default_rng(count).integers(0, 1 << 16, (4, 8, 8), dtype=np.uint16)
    held = np.zeros((32, 4), np.uint32)
    for i in range(count):
        matrix = matrices[i].T if trans else matrices[i]
        held[:, i] = [fragment(matrix, lane) for lane in range(32)]
    out = np.zeros((32, 8), np.uint16)
    loads = "\n".join(f"ld.global.b32 %r{10 + i}, [%d2+{4 * i}];" for i in range(4))
    body = (
        SETUP
        + loads
        + """
    mad.lo.u32 %r3, %r2, 16, %r1;
    mov.b32 %r20, 0;
    st.shared.v4.b32 [%r3], {%r20, %r20, %r20, %r20};
    bar.warp.sync 0xffffffff;
    """
        + f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared::cta.b16 [%r3], {regs(count)};\n"
        + """
    bar.warp.sync 0xffffffff;
    ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r3];
    st.global.v4.b32 [%d3], {%r20, %r21, %r22, %r23};
    """
    )
    run(body, held.view(np.uint8).reshape(-1), out.view(np.uint8).reshape(-1))
    np.testing.assert_array_equal(out[: 8 * count], matrices[:count].reshape(-1, 8))
    assert not out[8 * count :].any()


def test_rows_are_aligned_and_forms_are_known() -> None:
    buffers = np.zeros(512, np.uint8), np.zeros(512, np.uint8)
    with pytest.raises(MisalignedError, match="multiple of 16"):
        run(SETUP + "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [%r1+8];", *buffers)
    with pytest.raises(UnsupportedInstruction, match=r"modifier \.m8n16"):
        run(SETUP + "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b6x16_p32 {%r10}, [%r1];", *buffers)
