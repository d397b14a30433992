# SPDX-License-Identifier: Apache-2.0
"""The report on compiled kernels: loops of both languages, resources out of a cubin, the bytes of a call."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dsv4_gemm_rs import WeightKind
from dsv4_gemm_rs.bench.run import wire_bytes
from dsv4_gemm_rs.cli import inspect_kernels
from dsv4_gemm_rs.cli.main import main
from dsv4_gemm_rs.inspection import kernels, machine_code
from dsv4_gemm_rs.inspection.kernels import inspect_kernel, sent_bytes
from dsv4_gemm_rs.inspection.listing import listing_of_ptx, listing_of_sass
from dsv4_gemm_rs.inspection.machine_code import resources_of
from dsv4_gemm_rs.kernels.families import FAMILIES, MULTICAST_FAMILIES, Operand, Strategy
from dsv4_gemm_rs.kernels.sm100.config import KernelConfig
from dsv4_symm_mem.errors import ArgumentError
from gemm_rs_support import problems_for

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
.L_x_0:
        /*0010*/                   LDTM.x64 R4, tmem[UR4] ;
.L_x_1:
        /*0020*/              @!P0 SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3 ;
        /*0030*/                   UTCQMMA.2CTA gdesc[UR40], gdesc[UR38], tmem[UR21], tmem[UR6], UP0 ;
        /*0040*/                   BRA.U UP0, `(.L_x_1) ;
        /*0050*/                   STG.E.NA.ENL2.256 desc[UR16][R76.64+0x80], R4, R12 ;
        /*0060*/               @P2 BRA `(.L_x_2) ;
        /*0070*/               @P1 BRA `(.L_x_0) ;
.L_x_2:
        /*0080*/                   EXIT ;
"""
PTX = """
.visible .entry kernel() {
	.reg .pred %p<3>;
$L__BB0_1:
	tcgen05.ld.sync.aligned.32x32b.x64.b32 {%r1, %r2}, [%r3];
$L__BB0_2: // the k loop
	{
	.reg .pred p;
	setp.ne.b32 p, %r6, 0;
	tcgen05.mma.cta_group::2.kind::f16 [%r0], %rd1, %rd2, %r3, p;
	}
	@%p1 bra $L__BB0_2;
	st.global.v8.b32 [%rd3], {%r1, %r2};
	@!%p2 bra 	$L__BB0_1;
	ret;
}
"""


def test_loops_of_both_languages() -> None:
    sass, ptx = listing_of_sass(SASS), listing_of_ptx(PTX)
    multiply = {"sass": sass, "ptx": ptx}
    inner = {name: each.loop_around(kernels.MULTIPLY[name]) for name, each in multiply.items()}
    outer = {name: each.loop_around(kernels.DRAIN[name]) for name, each in multiply.items()}
    assert inner["sass"] == {"SYNCS.PHASECHK.TRANS64.TRYWAIT": 1, "UTCQMMA.2CTA": 1, "BRA.U": 1}
    assert inner["ptx"] == {"setp.ne.b32": 1, "tcgen05.mma.cta_group::2.kind::f16": 1, "bra": 1}
    assert outer["sass"] is not None
    assert outer["sass"].total() == 7
    assert outer["ptx"] is not None
    assert outer["ptx"].total() == 6
    assert sass.loop_around("HGMMA") is ptx.loop_around("wgmma") is None
    assert sass.matching(kernels.STORE["sass"]) == {"STG.E.NA.ENL2.256": 1}
    assert ptx.matching(kernels.STORE["ptx"]) == {"st.global.v8.b32": 1}
    assert len(sass.opcodes) == 9


def elf(attributes: bytes) -> bytes:
    """The least that a cubin needs: a table of sections, their names, `.nv.info`."""
    names = b"\0.shstrtab\0.nv.info\0"
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 0x28, 64 + len(names) + len(attributes))
    struct.pack_into("<3H", header, 0x3A, 64, 3, 1)
    sections = b"".join(
        struct.pack("<IIQQQQ", *entry).ljust(64, b"\0")
        for entry in (
            (0, 0, 0, 0, 0, 0),
            (1, 3, 0, 0, 64, len(names)),
            (11, 0x70000000, 0, 0, 64 + len(names), len(attributes)),
        )
    )
    return bytes(header) + names + attributes + sections


def test_resources_are_the_most_of_any_function() -> None:
    def attribute(number: int, function: int, value: int) -> bytes:
        return struct.pack("<BBHII", 4, number, 8, function, value)

    unsized = struct.pack("<BBH", 3, 0x1B, 168)
    text = attribute(0x2F, 9, 156) + unsized + attribute(0x2F, 8, 40) + attribute(0x11, 9, 0)
    assert resources_of(elf(text)) == machine_code.Resources(156, 0)
    assert resources_of(elf(text + attribute(0x12, 9, 48))).stack_bytes == 48
    for wrong in (b"\x7fELF", b"no cubin", elf(unsized), elf(b"").replace(b".nv.info", b".nv.inf0")):
        with pytest.raises(ArgumentError, match="cubin"):
            resources_of(wrong)


def test_a_kernel_without_a_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "disassembler", lambda: None)
    row = inspect_kernel(KernelConfig(Operand.MXFP8, 128, 2), "sm_100a", 8192, 5120, 4)
    assert row["sass"] is None
    assert (row["tile"], row["stack_bytes"], row["tensor_columns"]) == ("256x128", 0, 512)
    assert 100 < row["registers"] <= 168
    assert row["sent_bytes"] == wire_bytes(8192, 5120, 4)
    assert row["ptx"]["local_accesses"] == 0
    assert row["ptx"]["multiply_loop"]["of_which"]["tcgen05.cp.cta_group::2.32x128b.warpx4"] == 2
    assert row["ptx"]["drain_loop"]["of_which"]["st.global.L1::no_allocate.v8.b32"] == 4
    shown = inspect_kernels.table([row])
    assert "4 x 32 B" in shown
    assert "nvidia-cuda-nvdisasm is not installed" in shown
    assert all(check.holds for check in inspect_kernels.checks([row]))
    spilled = [check for check in inspect_kernels.checks([row | {"stack_bytes": 8}]) if not check.holds]
    assert [check.name for check in spilled] == ["mxfp8 256x128: bytes of stack and accesses to local memory"]


@pytest.mark.parametrize(("m", "n"), [(131, 192), (1, 64), (257, 128)])
def test_bytes_of_a_call_are_what_the_links_carry(m: int, n: int, request: pytest.FixtureRequest) -> None:
    library = pytest.importorskip(
        "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
    )
    if obstacle := library.obstacle():
        pytest.skip(obstacle)
    from sm100_support import Group, operands_of

    size, config = 2, KernelConfig(Operand.BF16, 64)
    make: Callable[..., Any] = request.getfixturevalue("emulator")
    emulation = make(size, arch="sm_100a")
    group = Group(emulation, config, m, n)
    group.call([operands_of(p, Operand.BF16) for p in problems_for(size, m, n, 64, WeightKind.BF16)])
    group.finish()
    told = sent_bytes(config, m, n, size)
    assert emulation.link_bytes()[0, 1] == told["sent_bytes"] + told["flag_bytes"]
    group.close()


def test_a_kernel_that_reads_through_multicast_sends_its_whole_partial() -> None:
    push = KernelConfig(Operand.MXFP8, 128)
    pulled = KernelConfig(Operand.MXFP8, 128, strategy=Strategy.MULTICAST)
    for world_size in (2, 4, 8):
        told, other = (sent_bytes(config, 8192, 5120, world_size) for config in (pulled, push))
        assert told["sent_bytes"] == 2 * 8192 * 5120
        assert other["sent_bytes"] * world_size == told["sent_bytes"] * (world_size - 1)
        assert told["flag_bytes"] == other["flag_bytes"]
    assert sent_bytes(pulled, 8192, 5120, 1) == {"sent_bytes": 0, "flag_bytes": 0}


def test_the_command_writes_a_row_for_each_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"measure": "static", "operand": "bf16", "tile": "128x64", "stack_bytes": 0, "threads": 320}
    made |= {"exchange": "push"}
    made |= {"registers": 150, "shared_bytes": 1000, "tensor_columns": 64, "stages": 4, "sass": None}
    made |= {"sent_bytes": 1, "flag_bytes": 8}
    made["ptx"] = {"local_accesses": 0, "multiply_loop": None, "drain_loop": None, "stores": {}}
    calls: list[tuple[Any, ...]] = []

    def inspected(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        return dict(made)

    monkeypatch.setattr(inspect_kernels, "inspect_kernel", inspected)
    output = tmp_path / "static.json"
    assert main(["inspect", "--arch", "sm_103a", "--tokens", "77", "--output", str(output)]) == 0
    both = [*FAMILIES[103], *MULTICAST_FAMILIES[103]]
    assert calls == [(config, "sm_103a", 77, 5120, 4) for config in both]
    assert len(json.loads(output.read_text())["rows"]) == len(both)
    assert "64 of 64 checks hold" in capsys.readouterr().out
    calls.clear()
    arguments = ["--exchange", "multicast", "--output", str(output)]
    assert main(["inspect", "--arch", "sm_100a", *arguments]) == 0
    assert [config for config, *_ in calls] == list(MULTICAST_FAMILIES[100])
    assert main(["inspect", "--arch", "sm_90a", *arguments]) == 2
    assert "all that there is for sm_90a" in capsys.readouterr().err
    made["registers"] = 255
    assert main(["inspect", "--output", str(output)]) == 1
    assert "MISSED: bf16 128x64: registers of a CTA = 81600.000" in capsys.readouterr().out
    assert main(["inspect", "--n", "100", "--output", str(output)]) == 2
