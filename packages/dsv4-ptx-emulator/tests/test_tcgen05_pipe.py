# SPDX-License-Identifier: Apache-2.0
"""When tcgen05 operations happen: order, commits, pairs of CTAs with TMA, and what is reported of misuse."""

from __future__ import annotations

import numpy as np
import pytest
from dsv4_ptx_emulator.emulator import Emulator
from dsv4_ptx_emulator.errors import (
    AsyncMisuseError,
    DeadlockError,
    EmulatorError,
    OutOfBoundsError,
    UninitialisedError,
)
from dsv4_ptx_emulator.formats import swizzle
from probe import kernel as probe_kernel
from tensor_core_kernels import (
    WAIT,
    Case,
    commit,
    launch,
    matrix_of,
    problem,
    result,
    shared_descriptor,
    whole,
)
from tensor_kernels import aligned, contiguous, with_map

PLAIN = Case(128, 32, 64)


def failing(text: str, case: Case = PLAIN, seeds: int = 4) -> None:
    """Run under a few seeds; the first that finds something raises."""
    given = problem(case)
    for seed in range(seeds):
        launch(text, case, given.image, np.zeros((case.ctas, 128, case.n), np.uint32), seed)


def test_reading_before_the_commit_is_reported() -> None:
    """Under every seed, whether the multiplication has been executed by then or not."""
    for missing in (WAIT, commit(PLAIN)):
        text = whole(PLAIN).replace(missing, "bar.sync 0;" if missing == WAIT else "")
        if missing != WAIT:
            text = text.replace(WAIT, "bar.sync 0;")
        for seed in range(4):
            given = problem(PLAIN)
            out = np.zeros((1, 128, 32), np.uint32)
            with pytest.raises(
                AsyncMisuseError, match=r"ld\S+ accesses .* tcgen05\.mma.* no commit has told"
            ):
                launch(text, PLAIN, given.image, out, seed)


def test_a_commit_waits_for_its_own_thread_only() -> None:
    """Lane 1 of the warp has issued nothing, so its commit says nothing about lane 0's multiplications."""
    text = whole(PLAIN).replace(
        f"\n{commit(PLAIN)}\nISSUED:\n",
        f"\nISSUED: setp.eq.u32 %p6, %r2, 1;\n@%p6 {commit(PLAIN)}\nbar.sync 0;\n",
    )
    with pytest.raises(AsyncMisuseError, match="no commit has told complete"):
        failing(text)


def test_operands_are_read_when_the_operation_is_executed() -> None:
    """Shared memory that is overwritten before the commit gives a result that depends on the seed."""
    overwrite = "fence.proxy.async; mov.b32 %r12, 0; st.shared.v4.b32 [%r0], {%r12, %r12, %r12, %r12};"
    given = problem(PLAIN, integers=True)
    text = whole(PLAIN).replace(commit(PLAIN), commit(PLAIN) + "\n" + overwrite)
    found = {matrix_of(PLAIN, result(PLAIN, text, given, seed)).tobytes() for seed in range(24)}
    assert len(found) > 1
    assert given.exact.tobytes() in found


def test_copies_and_multiplications_keep_their_order() -> None:
    """The second half's scale factors go where the first half's were, without a wait in between."""
    case = Case(128, 32, 256)
    given = problem(case, integers=True)
    for seed in range(6):
        found = matrix_of(case, result(case, whole(case), given, seed))
        np.testing.assert_array_equal(found, given.exact)


def test_scale_factors_must_be_in_all_partitions() -> None:
    text = whole(PLAIN).replace("32x128b.warpx4", "4x256b")
    with pytest.raises(UninitialisedError, match="nothing has written"):
        failing(text)
    # Rows 1 to 32 of the second copy where row 0 to 31 of the first are, in two partitions.
    lines = whole(PLAIN).split("\n")
    at = next(i for i, line in enumerate(lines) if "warpx4" in line)
    lines.insert(at + 1, "add.u64 %d6, %d6, 1; " + lines[at].replace("32x128b.warpx4", "4x256b"))
    with pytest.raises(
        AsyncMisuseError, match=r"scale factor 0 is 0x.* in lanes 0 to 31, but 0x.* in partition"
    ):
        failing("\n".join(lines))


def test_a_cta_must_not_end_before_its_operations() -> None:
    tail = whole(PLAIN).split("tcgen05.ld", 1)[0].split("COMPUTED", 1)[0]
    free = (
        "bar.sync 0; @!%p1 bra GONE; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t0, 512;\nGONE: ret;\n}\n"
    )
    with pytest.raises(
        AsyncMisuseError, match=r"tcgen05\.dealloc\S+ accesses .* and so does tcgen05\.(cp|mma)"
    ):
        failing(tail + free, seeds=1)
    with pytest.raises(AsyncMisuseError, match=r"the CTA ended while tcgen05|without tcgen05\.dealloc"):
        failing(tail + "ret;\n}\n")


def idesc_with(change: int, case: Case = PLAIN) -> str:
    step = case.instruction_descriptor(0)
    return whole(case).replace(f"mov.b32 %r9, {step};", f"mov.b32 %r9, {step ^ change};")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (1 << 2, "sparsity is not emulated"),
        (1 << 3, "bits 0x00000008 must be zero"),
        (1 << 31, "bits 0x80000000 must be zero"),
        (1 << 23, "scale factors of type UE4M3"),
        (2 << 7, "types 2 and 0"),
        (0b1100 << 24, "the shape 64x32 with .cta_group::1"),
        (0b11000 << 24, "the shape 256x32 with .cta_group::1"),
        (4 << 17, "the shape 128x0 with"),
    ],
)
def test_instruction_descriptors_are_checked(change: int, text: str) -> None:
    with pytest.raises(AsyncMisuseError, match=text):
        failing(idesc_with(change), seeds=1)


def test_a_pair_needs_its_peer() -> None:
    pair = Case(256, 32, 32)
    given = problem(pair)
    emulator = Emulator("sm_100a", max_steps=100_000)
    emulator.register(given.image.ctypes.data, given.image.nbytes)
    parameters = given.image.ctypes.data.to_bytes(8, "little") * 2
    size = len(given.image) // 2
    emulator.launch(
        whole(pair), "probe", grid=(1, 1, 1), block=(128, 1, 1), shared_bytes=size, parameters=parameters
    )
    with pytest.raises(AsyncMisuseError, match="there is no peer CTA"):
        emulator.run()


def test_masks_of_a_commit() -> None:
    pair = Case(256, 32, 32)
    with pytest.raises(AsyncMisuseError, match="CTA mask 0x7 in a cluster of 2"):
        failing(whole(pair).replace("mov.b16 %h0, 3", "mov.b16 %h0, 7"), pair, seeds=1)
    with pytest.raises(DeadlockError, match="mbarrier"):
        failing(whole(pair).replace("mov.b16 %h0, 3", "mov.b16 %h0, 1"), pair, seeds=1)


A_AT = shared_descriptor(0, 16, 1024, 3)


@pytest.mark.parametrize(
    ("old", "new", "error", "text"),
    [
        ("discard [%t0]", "discard [%t1]", AsyncMisuseError, "D with M = 128 at lane 16"),
        ("[%t5], %d6", "[%t1], %d6", AsyncMisuseError, "the destination begins at lane 16"),
        ("[%t3], [%t4]", "[%t1], [%t4]", AsyncMisuseError, "scale factors that do not begin at lane 0"),
        ("%p5, 0, 0;", "%p5, 1, 0;", UninitialisedError, r"tcgen05\.mma\S+ reads lane 0, column \d+"),
        (f"%d5, {A_AT};", f"%d5, {A_AT + 0x3000};", OutOfBoundsError, r"tensor core of rank 0.* not mapped"),
    ],
)
def test_operands_in_wrong_places(old: str, new: str, error: type[EmulatorError], text: str) -> None:
    program = whole(PLAIN).replace(old, new).replace("%d5, 4;", "%d5, 4; add.u32 %t1, %t0, 0x100000;")
    with pytest.raises(error, match=text):
        failing(program, seeds=1)


PAIRED = """
.shared .align 1024 .b8 data[2048]; .shared .align 8 .b64 bar;
mov.u32 %r0, data; mov.u32 %r1, bar; mov.u32 %r2, %tid.x; mov.u32 %r3, %cluster_ctarank;
setp.eq.u32 %p0, %r2, 0; setp.eq.and.u32 %p1, %r3, 0, %p0; setp.eq.and.u32 %p2, %r3, {issuer}, %p0;
ld.param.b64 %d0, [p0]; ld.param.b64 %d1, [p1];
@%p0 mbarrier.init.shared.b64 [%r1], 1;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {expected};
shl.b32 %r4, %r3, 3; mov.b32 %r5, 0; mov.b16 %h0, 3;
and.b32 %r6, %r1, 0xfeffffff;
{copies}
@!%p1 bra OTHER;
LOADED: mbarrier.try_wait.parity.shared.b64 %p3, [%r1], 0;
@!%p3 bra LOADED;
OTHER:
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
mad.wide.u32 %d1, %r3, 2048, %d1; mad.wide.u32 %d1, %r2, 4, %d1;
shl.b32 %r7, %r2, 2; add.u32 %r0, %r0, %r7;
"""
COPY = (
    "@%p0 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{cast}{group} "
    "[%r0{offset}], [%d0, {{%r5, %r4}}], [%r6]{mask};\n"
)


@pytest.mark.parametrize("seed", range(3))
def test_loads_of_a_pair_tell_the_even_cta(seed: int) -> None:
    """Each CTA loads rows of its own, one of them for both; the even CTA's barrier counts all bytes."""
    data = aligned(2048).reshape(16, 128)
    data[...] = np.random.default_rng(9).integers(0, 256, (16, 128), dtype=np.uint8)
    tensor_map = with_map(contiguous(data, (128, 8), "u8", swizzle.NONE))
    own = COPY.format(group=".cta_group::2", cast="", offset="", mask="")
    both = COPY.format(group=".cta_group::2", cast=".multicast::cluster", offset="+1024", mask=", %h0")
    lines = [f"ld.shared.b32 %r8, [%r0+{at}]; st.global.b32 [%d1+{at}], %r8;" for at in range(0, 2048, 128)]
    # The multicast comes from CTA 1 alone and names its own rows.
    body = PAIRED.format(issuer=1, expected=4096, copies=own + both.replace("%p0", "%p2")) + "\n".join(lines)
    out = aligned(4096).reshape(2, 16, 128)
    emulator = Emulator("sm_100a", seed=seed, max_steps=1_000_000)
    for buffer in (data, tensor_map, out):
        emulator.register(buffer.ctypes.data, buffer.nbytes)
    parameters = tensor_map.ctypes.data.to_bytes(8, "little") + out.ctypes.data.to_bytes(8, "little")
    text = probe_kernel(body, arch="sm_100a", params=2)
    emulator.launch(text, "probe", grid=(2, 1, 1), block=(32, 1, 1), cluster=(2, 1, 1), parameters=parameters)
    emulator.run()
    np.testing.assert_array_equal(out[0, :8], data[:8])
    np.testing.assert_array_equal(out[1, :8], data[8:])
    for rank in range(2):
        np.testing.assert_array_equal(out[rank, 8:], data[8:])


def test_without_the_group_a_barrier_of_the_peer_is_refused() -> None:
    data = aligned(2048).reshape(16, 128)
    tensor_map = with_map(contiguous(data, (128, 8), "u8", swizzle.NONE))
    own = COPY.format(group="", cast="", offset="", mask="")
    text = probe_kernel(PAIRED.format(issuer=1, expected=2048, copies=own), arch="sm_100a", params=2)
    emulator = Emulator("sm_100a", max_steps=100_000)
    for buffer in (data, tensor_map):
        emulator.register(buffer.ctypes.data, buffer.nbytes)
    parameters = tensor_map.ctypes.data.to_bytes(8, "little") * 2
    emulator.launch(text, "probe", grid=(2, 1, 1), block=(32, 1, 1), cluster=(2, 1, 1), parameters=parameters)
    with pytest.raises(AsyncMisuseError, match="data goes to CTA 1 of the cluster, the barrier is in CTA 0"):
        emulator.run()


def test_a_cta_must_not_end_before_data_of_a_pair_arrives() -> None:
    """The peer waits for nothing: its data is told to the even CTA."""
    data = aligned(2048).reshape(16, 128)
    tensor_map = with_map(contiguous(data, (128, 8), "u8", swizzle.NONE))
    own = COPY.format(group=".cta_group::2", cast="", offset="", mask="")
    body = PAIRED.format(issuer=1, expected=2048, copies=own).split("OTHER:")[0] + "OTHER:"
    text = probe_kernel(body, arch="sm_100a", params=2)
    found = []
    for seed in range(8):
        emulator = Emulator("sm_100a", seed=seed, max_steps=100_000)
        for buffer in (data, tensor_map):
            emulator.register(buffer.ctypes.data, buffer.nbytes)
        parameters = tensor_map.ctypes.data.to_bytes(8, "little") * 2
        emulator.launch(
            text, "probe", grid=(2, 1, 1), block=(32, 1, 1), cluster=(2, 1, 1), parameters=parameters
        )
        try:
            emulator.run()
        except AsyncMisuseError as error:
            found.append(str(error))
    assert len(found) > 2
    assert all("the CTA ended while tma.load" in text for text in found)
