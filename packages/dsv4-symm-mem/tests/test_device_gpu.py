# SPDX-License-Identifier: Apache-2.0
"""The device helpers on one GPU: what is published is read whole, waits end as they should, sums are exact.

Producer and consumer are two kernels on two streams of one device, the peer's memory another buffer of it, as
for virtual ranks. Every wait has a deadline, so a broken hand-over fails instead of hanging. Both kernels of
a pair run once before they meet, as loading a kernel may wait for one that spins.
"""

# The DSL's decorators have no types.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from cuda.bindings import driver
from cutlass import Constexpr, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from dsv4_symm_mem import device
from dsv4_symm_mem.device import WaitStatus
from dsv4_symm_mem.protocol.words import Abort, AbortKind, signal
from dsv4_symm_mem.testing.ptx import compile_ptx

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False"
)

MILLISECOND = 1_000_000
HANG_NS = 5_000 * MILLISECOND
SIGNATURE = 0x5A5A
THREADS = 128
SLOT_BYTES = THREADS * 16
BANKS = 2
ROUNDS = 2000

PLAIN, BULK, POLLED = "plain", "bulk", "polled"


@cute.jit
def wait_by_one_thread(flag: Int64, want: Int64, abort: Int64, deadline: Int64, shared: Any) -> Int32:
    """Thread 0 waits, all threads of the CTA get its status and may read what was published."""
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        status, _, _ = device.wait_signal(flag, want, abort, deadline)
        cute.arch.store(shared, status, ss="cta")
    cute.arch.sync_threads()
    status = cute.arch.load(shared, Int32, ss="cta")
    cute.arch.sync_threads()
    return status


@cute.jit
def pattern(turn: Int64, thread: Int32) -> Any:
    """Four words, none of them 0, that differ between turns and threads."""
    first = (Uint32(turn) * Uint32(THREADS) + Uint32(thread)) * Uint32(4) + Uint32(1)
    return (first, first + Uint32(1), first + Uint32(2), first + Uint32(3))


@cute.kernel
def producer_kernel(
    mode: Constexpr[str], slots: Int64, flag: Int64, credit: Int64, abort: Int64, result: Int64, rounds: Int64
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    shared = cute.arch.alloc_smem(Int32, 1)
    stage = cute.arch.alloc_smem(Uint32, SLOT_BYTES // 4, alignment=128)
    deadline = device.deadline_after(Int64(HANG_NS))
    status = Int32(int(WaitStatus.ARRIVED))
    turn = Int64(1)
    while turn <= rounds and status == Int32(int(WaitStatus.ARRIVED)):
        if turn > Int64(BANKS):
            want = signal(turn - Int64(BANKS), SIGNATURE)
            status = wait_by_one_thread(credit + (turn % BANKS) * 8, want, abort, deadline, shared)
        slot = slots + (turn % BANKS) * SLOT_BYTES
        words = pattern(turn, thread)
        if const_expr(mode == BULK):
            for i in range_constexpr(4):
                cute.arch.store(stage + thread * 4 + i, words[i], ss="cta")
            device.fence_proxy_async_shared()
            cute.arch.sync_threads()
            if thread == 0:
                device.bulk_store(slot, stage, Int32(SLOT_BYTES))
                device.bulk_commit()
                device.bulk_wait(0)
                device.fence_proxy_async()
        elif const_expr(mode == POLLED):
            device.store_relaxed_16(slot + Int64(thread) * 16, words)
        else:
            device.store_16(slot + Int64(thread) * 16, words)
        cute.arch.sync_threads()
        if thread == 0:
            device.store_release(flag + (turn % BANKS) * 8, signal(turn, SIGNATURE))
        turn += 1
    if thread == 0:
        device.store_relaxed(result, Int64(status))
        device.store_relaxed(result + 8, turn - 1)


@cute.jit
def producer(
    mode: Constexpr[str],
    slots: Int64,
    flag: Int64,
    credit: Int64,
    abort: Int64,
    result: Int64,
    rounds: Int64,
    stream: driver.CUstream,
) -> None:
    producer_kernel(mode, slots, flag, credit, abort, result, rounds).launch(
        grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


@cute.kernel
def consumer_kernel(
    mode: Constexpr[str], slots: Int64, flag: Int64, credit: Int64, abort: Int64, result: Int64, rounds: Int64
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    shared = cute.arch.alloc_smem(Int32, 1)
    deadline = device.deadline_after(Int64(HANG_NS))
    status = Int32(int(WaitStatus.ARRIVED))
    wrong = Int64(0)
    turn = Int64(1)
    zero = Uint32(0)
    while turn <= rounds and status == Int32(int(WaitStatus.ARRIVED)):
        slot = slots + (turn % BANKS) * SLOT_BYTES + Int64(thread) * 16
        if const_expr(mode == POLLED):
            a, b, c, d = device.load_relaxed_16(slot)
            while (a == zero or b == zero or c == zero or d == zero) and device.globaltimer() < deadline:
                a, b, c, d = device.load_relaxed_16(slot)
            device.store_relaxed_16(slot, (zero, zero, zero, zero))
            cute.arch.sync_threads()
        else:
            want = signal(turn, SIGNATURE)
            status = wait_by_one_thread(flag + (turn % BANKS) * 8, want, abort, deadline, shared)
            a, b, c, d = device.load_16(slot)
            cute.arch.sync_threads()
        if thread == 0:
            device.store_release(credit + (turn % BANKS) * 8, signal(turn, SIGNATURE))
        e, f, g, h = pattern(turn, thread)
        if a != e or b != f or c != g or d != h:
            wrong += 1
        turn += 1
    cute.arch.atomic_add(device.global_pointer(result + 16, Int64, 8), wrong, sem="relaxed", scope="gpu")
    if thread == 0:
        device.store_relaxed(result, Int64(status))
        device.store_relaxed(result + 8, turn - 1)


@cute.jit
def consumer(
    mode: Constexpr[str],
    slots: Int64,
    flag: Int64,
    credit: Int64,
    abort: Int64,
    result: Int64,
    rounds: Int64,
    stream: driver.CUstream,
) -> None:
    consumer_kernel(mode, slots, flag, credit, abort, result, rounds).launch(
        grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


@cute.kernel
def wait_kernel(flag: Int64, want: Int64, abort: Int64, timeout_ns: Int64, result: Int64) -> None:
    start = device.globaltimer()
    deadline = device.deadline_after(timeout_ns)
    status, seen, polls = device.wait_signal(flag, want, abort, deadline)
    device.store_relaxed(result, Int64(status))
    device.store_relaxed(result + 8, seen)
    device.store_relaxed(result + 16, polls)
    device.store_relaxed(result + 24, device.globaltimer() - start)
    device.store_relaxed(result + 32, device.abort_word(want >> 16, Int32(3), status, Int32(5)))


@cute.jit
def wait(
    flag: Int64, want: Int64, abort: Int64, timeout_ns: Int64, result: Int64, stream: driver.CUstream
) -> None:
    wait_kernel(flag, want, abort, timeout_ns, result).launch(grid=[1, 1, 1], block=[1, 1, 1], stream=stream)


@cute.kernel
def raise_kernel(abort: Int64, word: Int64, result: Int64) -> None:
    device.store_relaxed(result, device.raise_abort(abort, word))


@cute.jit
def raise_(abort: Int64, word: Int64, result: Int64, stream: driver.CUstream) -> None:
    raise_kernel(abort, word, result).launch(grid=[1, 1, 1], block=[1, 1, 1], stream=stream)


@cute.kernel
def ticket_kernel(ticket: Int64, epoch: Int64, places: Int64) -> None:
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    device.store_relaxed(places + Int64(block) * 8, Int64(device.smid()))
    if device.arrive_ticket(ticket, blocks):
        device.store_relaxed(epoch, device.load_relaxed(epoch) + 1)


@cute.jit
def ticket(ticket: Int64, epoch: Int64, places: Int64, blocks: Int32, stream: driver.CUstream) -> None:
    ticket_kernel(ticket, epoch, places).launch(grid=[blocks, 1, 1], block=[1, 1, 1], stream=stream)


@cute.kernel
def sum_kernel(packed: Int64, accumulators: Int64, unpacked: Int64, sums: Int64, rounded: Int64) -> None:
    """Thread i: 8 BF16 values and 8 FP32 accumulators; writes the values, the sums and the sums as BF16."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = Int64(block) * THREADS + Int64(thread)
    words = device.load_16(packed + index * 16)
    bits = device.load_32(accumulators + index * 32)
    before = (
        bits[0].bitcast(Float32),
        bits[1].bitcast(Float32),
        bits[2].bitcast(Float32),
        bits[3].bitcast(Float32),
        bits[4].bitcast(Float32),
        bits[5].bitcast(Float32),
        bits[6].bitcast(Float32),
        bits[7].bitcast(Float32),
    )
    store_floats(unpacked + index * 32, device.unpack_bf16(words))
    after = device.add_bf16(before, words)
    store_floats(sums + index * 32, after)
    device.store_16(rounded + index * 16, device.pack_bf16(after))


def store_floats(address: Int64, values: Any) -> None:
    device.store_32(address, tuple(value.bitcast(Uint32) for value in values))


@cute.jit
def sum_(
    packed: Int64,
    accumulators: Int64,
    unpacked: Int64,
    sums: Int64,
    rounded: Int64,
    blocks: Int32,
    stream: driver.CUstream,
) -> None:
    sum_kernel(packed, accumulators, unpacked, sums, rounded).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


HOSTS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    **{
        f"{name} {mode}": (host, (mode, *[Int64(0)] * 6))
        for name, host in (("producer", producer), ("consumer", consumer))
        for mode in (PLAIN, BULK, POLLED)
    },
    "wait": (wait, (Int64(0),) * 5),
    "raise": (raise_, (Int64(0),) * 3),
    "ticket": (ticket, (Int64(0), Int64(0), Int64(0), Int32(1))),
    "sum": (sum_, (*[Int64(0)] * 5, Int32(1))),
}
"""Every kernel of this file: its host function and arguments to compile it with, the stream left out."""


@pytest.mark.parametrize("name", sorted(HOSTS))
def test_kernels_of_the_gpu_tests_compile_without_a_gpu(name: str) -> None:
    host, args = HOSTS[name]
    assert ".entry" in compile_ptx(host, "sm_90a", (*args, cute.runtime.make_fake_stream()))


@functools.cache
def compiled(name: str) -> Callable[..., None]:
    host, args = HOSTS[name]
    run: Callable[..., None] = cute.compile(host, *args, driver.CUstream(0))
    return run


def launch(name: str, stream: torch.cuda.Stream, *args: int) -> None:
    compiled(name)(*args, driver.CUstream(stream.cuda_stream))


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cuda")


def two_streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(), torch.cuda.Stream()


class Exchange:
    """The buffers of one producer and one consumer, all zero, and a stream for each."""

    def __init__(self) -> None:
        self.slots = torch.zeros(BANKS * SLOT_BYTES, dtype=torch.uint8, device="cuda")
        self.control = torch.zeros(5, 16, dtype=torch.int64, device="cuda")
        self.results = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
        self.streams = two_streams()

    def clear(self) -> None:
        for buffer in (self.slots, self.control, self.results):
            buffer.zero_()
        torch.cuda.synchronize()

    def launch(self, name: str, side: int, rounds: int) -> None:
        flag, credit, abort = (self.control[i].data_ptr() for i in range(3))
        result = self.results[side].data_ptr()
        launch(name, self.streams[side], self.slots.data_ptr(), flag, credit, abort, result, rounds)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("first", ["producer", "consumer"])
@pytest.mark.parametrize("mode", [PLAIN, BULK, POLLED])
def test_what_is_published_is_read_whole(mode: str, first: str) -> None:
    exchange = Exchange()
    for side, name in enumerate(("producer", "consumer")):
        exchange.launch(f"{name} {mode}", side, 1)
        torch.cuda.synchronize()
    exchange.clear()
    order = [(0, "producer"), (1, "consumer")]
    for side, name in order if first == "producer" else reversed(order):
        exchange.launch(f"{name} {mode}", side, ROUNDS)
    torch.cuda.synchronize()
    (produced, consumed) = exchange.results.tolist()
    assert produced[:2] == [int(WaitStatus.ARRIVED), ROUNDS]
    assert consumed[:3] == [int(WaitStatus.ARRIVED), ROUNDS, 0]


def waited(flag: int, want: int, abort: int, timeout_ns: int) -> tuple[WaitStatus, int, int, int, int]:
    """Status, word seen, polls, nanoseconds and the abort word composed, of one wait."""
    memory, result = words(flag, abort), words(*[-1] * 5)
    address = memory.data_ptr()
    stream = torch.cuda.current_stream()
    launch("wait", stream, address, want, address + 8, timeout_ns, result.data_ptr())
    stream.synchronize()
    status, seen, polls, elapsed, word = result.tolist()
    return WaitStatus(status), seen, polls, elapsed, word


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("abort", [0, Abort(7, 1, AbortKind.FAILED).encode()])
@pytest.mark.parametrize("timeout_ns", [0, HANG_NS])
def test_raised_flag_ends_the_wait_at_once_even_beside_an_abort(abort: int, timeout_ns: int) -> None:
    want = signal(7, SIGNATURE)
    assert waited(want, want, abort, timeout_ns)[:3] == (WaitStatus.ARRIVED, want, 1)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("timeout_ms", [2, 20])
@pytest.mark.parametrize("flag", [0, signal(5, SIGNATURE), signal(9, SIGNATURE)])
def test_timeout_comes_at_the_deadline(flag: int, timeout_ms: int) -> None:
    status, seen, polls, elapsed, word = waited(flag, signal(7, SIGNATURE), 0, timeout_ms * MILLISECOND)
    assert (status, seen) == (WaitStatus.TIMEOUT, flag)
    assert timeout_ms * MILLISECOND <= elapsed < (timeout_ms + 2) * MILLISECOND
    assert polls > device.PLAIN_POLLS
    assert Abort.decode(word) == Abort(7, 3, AbortKind.TIMEOUT, 5)


@needs_gpu
@pytest.mark.gpu
def test_other_shape_in_the_same_call_is_a_mismatch() -> None:
    other = signal(7, SIGNATURE ^ 1)
    status, seen, polls, _, word = waited(other, signal(7, SIGNATURE), 0, HANG_NS)
    assert (status, seen, polls) == (WaitStatus.MISMATCH, other, 1)
    assert Abort.decode(word) == Abort(7, 3, AbortKind.MISMATCH, 5)


@needs_gpu
@pytest.mark.gpu
def test_abort_that_is_there_ends_the_wait_at_once() -> None:
    abort = Abort(6, 2, AbortKind.TIMEOUT).encode()
    assert waited(0, signal(7, SIGNATURE), abort, HANG_NS)[:3] == (WaitStatus.ABORTED, 0, 1)


@needs_gpu
@pytest.mark.gpu
def test_abort_raised_during_a_wait_ends_it_and_the_greater_word_stays() -> None:
    second, first = (Abort(7, 1, AbortKind.TIMEOUT, level).encode() for level in (9, 4))
    memory, waiter, raised = words(0, 0), words(*[-1] * 5), words(-1, -1)
    spare, unused = words(first, 0), words(*[-1] * 5)
    stream, other = two_streams()
    torch.cuda.synchronize()
    launch("wait", stream, spare.data_ptr(), first, spare.data_ptr() + 8, HANG_NS, unused.data_ptr())
    launch("raise", other, spare.data_ptr() + 8, first, raised.data_ptr())
    torch.cuda.synchronize()

    flag, abort, want = memory.data_ptr(), memory.data_ptr() + 8, signal(7, SIGNATURE)
    launch("wait", stream, flag, want, abort, HANG_NS, waiter.data_ptr())
    for index, word in enumerate((first, second)):
        launch("raise", other, abort, word, raised.data_ptr() + 8 * index)
    torch.cuda.synchronize()
    assert waiter.tolist()[0] == int(WaitStatus.ABORTED)
    assert waiter.tolist()[3] < HANG_NS
    assert raised.tolist() == [0, first]
    assert memory.tolist() == [0, first]


@needs_gpu
@pytest.mark.gpu
def test_last_cta_out_bumps_the_epoch_once_and_clears_the_ticket() -> None:
    control, stream = words(0, 0), torch.cuda.current_stream()
    sizes = (1, 64, 1000, 64)
    for blocks in sizes:
        places = words(*[-1] * blocks)
        launch("ticket", stream, control.data_ptr(), control.data_ptr() + 8, places.data_ptr(), blocks)
        stream.synchronize()
        assert int(places.min()) >= 0
        assert int(places.max()) < torch.cuda.get_device_properties(0).multi_processor_count
    assert control.tolist() == [0, len(sizes)]


def bits(values: torch.Tensor) -> torch.Tensor:
    """The bit patterns of FP32 or BF16 values, every NaN made the same one."""
    kind = torch.int32 if values.dtype == torch.float32 else torch.int16
    return values.view(kind).masked_fill(values.isnan(), 0x7FC0)


@needs_gpu
@pytest.mark.gpu
def test_sums_and_roundings_are_those_of_torch_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(20)
    every = torch.arange(1 << 16, dtype=torch.int32)
    # Any accumulator beside every BF16 value; then, beside 0, the midpoint between every two BF16 values.
    wild = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=generator).to(torch.int32)
    midpoints = every << 16 | 0x8000
    packed = torch.cat([every, torch.zeros_like(every)]).to(torch.int16).view(torch.bfloat16)
    accumulators = torch.cat([wild, midpoints]).view(torch.float32)
    count = packed.numel()
    inputs = packed.cuda(), accumulators.cuda()
    unpacked, sums = torch.empty(2, count, device="cuda").unbind()
    rounded = torch.empty(count, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.current_stream()
    outputs = unpacked, sums, rounded
    launch("sum", stream, *(t.data_ptr() for t in (*inputs, *outputs)), count // (8 * THREADS))
    stream.synchronize()

    # Unpacking moves bits: NaN payloads are kept, and compared.
    exact = packed.view(torch.int16).to(torch.int32) << 16
    assert torch.equal(unpacked.cpu().view(torch.int32), exact)
    assert torch.equal(bits(sums.cpu()), bits(accumulators + packed.float()))
    assert torch.equal(bits(rounded.cpu()), bits((accumulators + packed.float()).to(torch.bfloat16)))
