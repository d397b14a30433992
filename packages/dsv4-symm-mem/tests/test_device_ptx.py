# SPDX-License-Identifier: Apache-2.0
"""Every device helper compiles for both architectures to the PTX that its docstring states, in that order.

The texts are compared exactly: semantics, scope and width are the contract, and a DSL release that lowers
an operation to something else must be noticed here. Needs no GPU.
"""

# The DSL's decorators have no types.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
import re
from typing import Any

import cutlass.cute as cute
import pytest
from cutlass import Constexpr, Float32, Int32, Int64, Uint8, const_expr
from dsv4_symm_mem import device
from dsv4_symm_mem.errors import ArgumentError
from dsv4_symm_mem.protocol.words import AbortKind
from dsv4_symm_mem.testing.ptx import compile_ptx, instructions, opcodes, positions_in_order

ARCHES = ("sm_90a", "sm_100a")
NO_ALLOCATE = "global.L1::no_allocate"


@cute.kernel
def one_call_kernel(case: Constexpr[str], a: Int64, b: Int64) -> None:
    if const_expr(case == "store_release"):
        device.store_release(a, b)
    elif const_expr(case == "store_release gpu"):
        device.store_release(a, b, "gpu")
    elif const_expr(case == "store_relaxed"):
        device.store_relaxed(a, b)
    elif const_expr(case == "load_acquire"):
        device.store_relaxed(b, device.load_acquire(a), "cta")
    elif const_expr(case == "load_acquire gpu"):
        device.store_relaxed(b, device.load_acquire(a, "gpu"), "cta")
    elif const_expr(case == "load_relaxed"):
        device.store_relaxed(b, device.load_relaxed(a), "cta")
    elif const_expr(case == "raise_abort"):
        device.store_relaxed(b, device.raise_abort(a, b), "cta")
    elif const_expr(case == "arrive_ticket"):
        if device.arrive_ticket(a, Int32(b)):
            device.store_relaxed(b, Int64(1))
    elif const_expr(case == "load_16 store_16"):
        device.store_16(b, device.load_16(a))
    elif const_expr(case == "load_32 store_32"):
        device.store_32(b, device.load_32(a))
    elif const_expr(case == "load_relaxed_16 store_relaxed_16"):
        device.store_relaxed_16(b, device.load_relaxed_16(a))
    elif const_expr(case == "unpack_bf16 pack_bf16"):
        device.store_16(b, device.pack_bf16(device.unpack_bf16(device.load_16(a))))
    elif const_expr(case == "add_bf16"):
        sums = device.unpack_bf16(device.load_16(a))
        device.store_16(b, device.pack_bf16(device.add_bf16(sums, device.load_16(a + 16))))
    elif const_expr(case == "multimem_ld_reduce_bf16 multimem_store"):
        device.multimem_store(b, device.multimem_ld_reduce_bf16(a))
    elif const_expr(case == "multimem_store_release"):
        device.multimem_store_release(a, b)
    elif const_expr(case == "multimem_red_add_release"):
        device.multimem_red_add_release(a, b)
    elif const_expr(case == "fence_proxy_async"):
        device.fence_proxy_async()
    elif const_expr(case == "fence_proxy_async_global"):
        device.fence_proxy_async_global()
    elif const_expr(case == "fence_proxy_async_shared"):
        device.fence_proxy_async_shared()
    elif const_expr(case == "fence_proxy_alias"):
        device.fence_proxy_alias()
    elif const_expr(case == "fence_acq_rel_sys"):
        device.fence_acq_rel_sys()
    elif const_expr(case == "bulk_prefetch"):
        device.bulk_prefetch(a, Int32(4096))
    elif const_expr(case == "bulk"):
        device.bulk_store(a, cute.arch.alloc_smem(Uint8, 4096, alignment=128), Int32(4096))
        device.bulk_commit()
        device.bulk_wait_read(2)
        device.bulk_wait(1)
    elif const_expr(case == "globaltimer"):
        device.store_relaxed(a, device.globaltimer())
    elif const_expr(case == "deadline_after"):
        device.store_relaxed(a, device.deadline_after(b))
    elif const_expr(case == "nanosleep"):
        device.nanosleep(Int32(64))
    elif const_expr(case == "smid"):
        device.store_relaxed(a, Int64(device.smid()))
    else:
        raise AssertionError(case)


@cute.jit
def one_call(case: Constexpr[str], a: Int64, b: Int64) -> None:
    one_call_kernel(case, a, b).launch(grid=[1, 1, 1], block=[32, 1, 1])


EXPECTED: dict[str, list[str]] = {
    "store_release": ["st.release.sys.global.b64"],
    "store_release gpu": ["st.release.gpu.global.b64"],
    "store_relaxed": ["st.relaxed.sys.global.b64"],
    "load_acquire": ["ld.acquire.sys.global.b64", "st.relaxed.cta.global.b64"],
    "load_acquire gpu": ["ld.acquire.gpu.global.b64", "st.relaxed.cta.global.b64"],
    "load_relaxed": ["ld.relaxed.sys.global.b64", "st.relaxed.cta.global.b64"],
    "raise_abort": ["atom.global.sys.acq_rel.max.s64", "st.relaxed.cta.global.b64"],
    "arrive_ticket": [
        "atom.global.acq_rel.add.u64",
        "st.relaxed.gpu.global.b64",
        "st.relaxed.sys.global.b64",
    ],
    "load_16 store_16": [f"ld.{NO_ALLOCATE}.v4.b32", f"st.{NO_ALLOCATE}.v4.b32"],
    "load_relaxed_16 store_relaxed_16": ["ld.relaxed.sys.global.v4.b32", "st.relaxed.sys.global.v4.b32"],
    "multimem_ld_reduce_bf16 multimem_store": [
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2",
        "multimem.st.relaxed.sys.global.v4.bf16x2",
    ],
    "multimem_store_release": ["multimem.st.release.sys.global.b64"],
    "multimem_red_add_release": ["multimem.red.release.sys.global.add.u64"],
    "fence_proxy_async": ["fence.proxy.async"],
    "fence_proxy_async_global": ["fence.proxy.async.global"],
    "fence_proxy_async_shared": ["fence.proxy.async.shared::cta"],
    "fence_proxy_alias": ["fence.proxy.alias"],
    "fence_acq_rel_sys": ["fence.acq_rel.sys"],
    "bulk_prefetch": ["cp.async.bulk.prefetch.L2.global"],
    "bulk": [
        "cp.async.bulk.global.shared::cta.bulk_group",
        "cp.async.bulk.commit_group",
        "cp.async.bulk.wait_group.read",
        "cp.async.bulk.wait_group",
    ],
    "nanosleep": ["nanosleep.u32"],
}
"""The memory, fence and sleep instructions of each helper, complete and in order."""

MEMORY = ("ld.", "st.", "atom.", "red.", "multimem.", "fence.", "membar.", "cp.", "nanosleep.", "bar")


@functools.cache
def ptx_of(case: str, arch: str) -> str:
    return compile_ptx(one_call, arch, (case, Int64(0), Int64(0)))


def effects(ptx: str) -> list[str]:
    return [op for op in opcodes(ptx) if op.startswith(MEMORY) and not op.startswith("ld.param")]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", sorted(EXPECTED))
def test_helper_is_exactly_its_instructions(case: str, arch: str) -> None:
    ptx = ptx_of(case, arch)
    assert f".target {arch}" in ptx
    assert effects(ptx) == EXPECTED[case]


@pytest.mark.parametrize(
    ("arch", "width", "count"),
    [("sm_90a", "v4", 2), ("sm_100a", "v8", 1)],
)
def test_32_bytes_are_one_access_where_the_architecture_has_it(arch: str, width: str, count: int) -> None:
    wanted = [f"ld.{NO_ALLOCATE}.{width}.b32"] * count + [f"st.{NO_ALLOCATE}.{width}.b32"] * count
    assert effects(ptx_of("load_32 store_32", arch)) == wanted


@pytest.mark.parametrize("arch", ARCHES)
def test_bulk_waits_for_the_stated_number_of_groups(arch: str) -> None:
    found = instructions(ptx_of("bulk", arch))
    positions_in_order(found, "cp.async.bulk.wait_group.read 2", "cp.async.bulk.wait_group 1")


@pytest.mark.parametrize("arch", ARCHES)
def test_the_greater_abort_word_stays(arch: str) -> None:
    (atom,) = [line for line in instructions(ptx_of("raise_abort", arch)) if line.startswith("atom.")]
    assert ".max." in atom
    assert atom.endswith("], %rd2")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    ("case", "register"),
    [("globaltimer", "%globaltimer"), ("deadline_after", "%globaltimer"), ("smid", "%smid")],
)
def test_special_registers(case: str, register: str, arch: str) -> None:
    assert any(
        line.startswith("mov.") and line.endswith(register) for line in instructions(ptx_of(case, arch))
    )


@pytest.mark.parametrize("arch", ARCHES)
def test_unpacking_moves_bits_and_packing_rounds_without_saturation(arch: str) -> None:
    found = opcodes(ptx_of("unpack_bf16 pack_bf16", arch))
    assert found.count("shl.b32") == found.count("and.b32") == 4
    assert [op for op in found if op.startswith("cvt.")] == ["cvt.rn.bf16x2.f32"] * 4


def without_pairing(statements: list[str]) -> list[str]:
    """`statements` with each register that was moved out of a 64-bit pair named as the one that went in."""
    pairs: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    resolved: list[str] = []
    for statement in statements:
        renamed = re.sub(r"%\w+", lambda match: names.get(match.group(), match.group()), statement)
        if made := re.fullmatch(r"mov\.b64 (%rd\d+), \{(.*)\}", renamed):
            pairs[made[1]] = made[2].split(", ")
        elif split := re.fullmatch(r"mov\.b64 \{(.*)\}, (%rd\d+)", renamed):
            names.update(zip(split[1].split(", "), pairs[split[2]], strict=True))
        else:
            resolved.append(renamed)
    return resolved


@pytest.mark.parametrize("arch", ARCHES)
def test_packing_puts_the_lower_index_in_the_lower_half(arch: str) -> None:
    found = without_pairing(instructions(ptx_of("unpack_bf16 pack_bf16", arch)))
    low = [line.split(" ")[1].rstrip(",") for line in found if line.startswith("shl.b32")]
    high = [line.split(" ")[1].rstrip(",") for line in found if line.startswith("and.b32")]
    sources = [tuple(line.split(", ")[1:]) for line in found if line.startswith("cvt.")]
    assert sources == list(zip(high, low, strict=True))
    packed = [line.split(" ")[1].rstrip(",") for line in found if line.startswith("cvt.")]
    (stored,) = [line for line in found if line.startswith("st.")]
    assert stored.endswith("{" + ", ".join(packed) + "}")


@pytest.mark.parametrize("arch", ARCHES)
def test_sums_are_single_precision_and_rounded_as_written(arch: str) -> None:
    found = [
        op for op in opcodes(ptx_of("add_bf16", arch)) if op.startswith(("add.", "fma.")) and "f32" in op
    ]
    assert found == ["add.rn.f32"] * 8


@cute.kernel
def scaled_sum_kernel(a: Int64, b: Int64, scale: Float32) -> None:
    scaled = tuple(value * scale for value in device.unpack_bf16(device.load_16(a)))
    device.store_16(b, device.pack_bf16(device.add_bf16(scaled, device.load_16(a + 16))))


@cute.jit
def scaled_sum(a: Int64, b: Int64, scale: Float32) -> None:
    scaled_sum_kernel(a, b, scale).launch(grid=[1, 1, 1], block=[32, 1, 1])


@pytest.mark.parametrize("arch", ARCHES)
def test_a_product_before_the_sum_is_not_contracted(arch: str) -> None:
    found = opcodes(compile_ptx(scaled_sum, arch, (Int64(0), Int64(0), Float32(0))))
    assert not [op for op in found if op.startswith("fma.")]
    assert found.count("add.rn.f32") == 8


@cute.kernel
def wait_kernel(flag: Int64, want: Int64, abort: Int64, deadline: Int64, out: Int64) -> None:
    status, seen, polls = device.wait_signal(flag, want, abort, deadline, 100, 64)
    device.store_relaxed(out, Int64(status), "cta")
    device.store_relaxed(out + 8, seen, "cta")
    device.store_relaxed(out + 16, polls, "cta")


@cute.jit
def wait(flag: Int64, want: Int64, abort: Int64, deadline: Int64, out: Int64) -> None:
    wait_kernel(flag, want, abort, deadline, out).launch(grid=[1, 1, 1], block=[1, 1, 1])


@pytest.mark.parametrize("arch", ARCHES)
def test_waiting_reads_flag_abort_word_and_clock_in_its_loop(arch: str) -> None:
    ptx = compile_ptx(wait, arch, [Int64(0)] * 5)
    assert effects(ptx).count("ld.acquire.sys.global.b64") == 1
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.startswith("$") and line.endswith(":")}
    jumps = [(at, line.rstrip(";").split()[-1]) for at, line in enumerate(lines) if "bra" in line.split()[:2]]
    loop = {
        at for start, target in jumps if labels[target] < start for at in range(labels[target], start + 1)
    }
    inside = "\n".join(lines[at] for at in sorted(loop))
    positions_in_order(
        opcodes(inside), "ld.relaxed.sys.global.b64", "ld.acquire.sys.global.b64", "nanosleep.u32"
    )
    assert "%globaltimer" in inside
    assert "nanosleep.u32 64" in instructions(inside)


@cute.kernel
def publish_kernel(peer: Int64, flag: Int64, word: Int64) -> None:
    thread, _, _ = cute.arch.thread_idx()
    stage = cute.arch.alloc_smem(Uint8, 4096, alignment=128)
    cute.arch.store(stage + thread, Uint8(thread), ss="cta")
    device.fence_proxy_async_shared()
    cute.arch.sync_threads()
    if thread == 0:
        device.bulk_store(peer, stage, Int32(4096))
        device.bulk_commit()
        device.bulk_wait(0)
        device.fence_proxy_async()
        device.store_release(flag, word)


@cute.jit
def publish(peer: Int64, flag: Int64, word: Int64) -> None:
    publish_kernel(peer, flag, word).launch(grid=[1, 1, 1], block=[128, 1, 1])


@pytest.mark.parametrize("arch", ARCHES)
def test_bulk_publication_keeps_its_order(arch: str) -> None:
    assert effects(compile_ptx(publish, arch, [Int64(0)] * 3)) == [
        "st.shared::cta.b8",
        "fence.proxy.async.shared::cta",
        "bar.sync",
        "cp.async.bulk.global.shared::cta.bulk_group",
        "cp.async.bulk.commit_group",
        "cp.async.bulk.wait_group",
        "fence.proxy.async",
        "st.release.sys.global.b64",
    ]


@cute.kernel
def handover_kernel(flag: Int64, data: Int64, out: Int64) -> None:
    device.store_16(out, device.load_16(data))
    word = device.load_acquire(flag)
    device.store_16(out + 16, device.load_16(data))
    device.store_release(flag + 8, word)
    device.store_16(out + 16, device.load_16(data + 16))


@cute.jit
def handover(flag: Int64, data: Int64, out: Int64) -> None:
    handover_kernel(flag, data, out).launch(grid=[1, 1, 1], block=[32, 1, 1])


@pytest.mark.parametrize("arch", ARCHES)
def test_data_accesses_stay_on_their_side_of_acquire_and_release(arch: str) -> None:
    load, store = f"ld.{NO_ALLOCATE}.v4.b32", f"st.{NO_ALLOCATE}.v4.b32"
    assert effects(compile_ptx(handover, arch, [Int64(0)] * 3)) == [
        *(load, store),
        "ld.acquire.sys.global.b64",
        *(load, store),
        "st.release.sys.global.b64",
        *(load, store),
    ]


@cute.kernel
def multicast_kernel(own: Int64, multicast: Int64, flag: Int64, word: Int64, out: Int64) -> None:
    device.store_16(own, device.load_16(out))
    device.fence_proxy_alias()
    device.multimem_store_release(flag, word)
    device.load_acquire(flag + 8)
    device.fence_proxy_alias()
    device.store_16(out, device.multimem_ld_reduce_bf16(multicast))


@cute.jit
def multicast(own: Int64, multicast: Int64, flag: Int64, word: Int64, out: Int64) -> None:
    multicast_kernel(own, multicast, flag, word, out).launch(grid=[1, 1, 1], block=[1, 1, 1])


@pytest.mark.parametrize("arch", ARCHES)
def test_multicast_exchange_keeps_its_order(arch: str) -> None:
    assert effects(compile_ptx(multicast, arch, [Int64(0)] * 5)) == [
        f"ld.{NO_ALLOCATE}.v4.b32",
        f"st.{NO_ALLOCATE}.v4.b32",
        "fence.proxy.alias",
        "multimem.st.release.sys.global.b64",
        "ld.acquire.sys.global.b64",
        "fence.proxy.alias",
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2",
        f"st.{NO_ALLOCATE}.v4.b32",
    ]


def test_statuses_that_are_raised_are_abort_kinds() -> None:
    assert int(device.WaitStatus.TIMEOUT) == int(AbortKind.TIMEOUT)
    assert int(device.WaitStatus.MISMATCH) == int(AbortKind.MISMATCH)
    assert len(set(device.WaitStatus)) == 4


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: device.store_16(Int64(0), ()), "words"),
        (lambda: device.pack_bf16((Float32(0),)), "values"),
        (lambda: device.add_bf16((Float32(0),), ()), "accumulators"),
        (lambda: device.multimem_store(Int64(0), ()), "words"),
    ],
)
def test_wrong_number_of_words_is_named(call: Any, argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.argument == argument


def test_statements_are_read_without_comments_labels_and_directives() -> None:
    text = """
    .version 9.4
    .visible .entry k(.param .u64 p) { // begin
    $L__BB0_1:
      @!%p1 ld.acquire.sys.global.b64 \t%rd1, [%rd2]; /* two
      lines */ { .reg .pred q; bar.sync 0; }
      mov.b64 {%r1, %r2}, %rd1;
      bra.uni $L__BB0_1;
    }
    """
    assert instructions(text) == [
        "@!%p1 ld.acquire.sys.global.b64 %rd1, [%rd2]",
        "bar.sync 0",
        "mov.b64 {%r1, %r2}, %rd1",
        "bra.uni $L__BB0_1",
    ]
    assert opcodes(text) == ["ld.acquire.sys.global.b64", "bar.sync", "mov.b64", "bra.uni"]


def test_order_is_of_positions_and_what_is_missing_is_named() -> None:
    assert positions_in_order("abca", "a", "c", "a") == [0, 2, 3]
    with pytest.raises(AssertionError, match="no 'b' from position 3 on"):
        positions_in_order("abca", "c", "b")


def test_function_without_a_kernel_has_no_ptx() -> None:
    with pytest.raises(RuntimeError, match="left no PTX"):
        compile_ptx(launches_nothing, "sm_90a", (Int64(0),))


@cute.jit
def launches_nothing(a: Int64) -> None:
    pass
