# SPDX-License-Identifier: Apache-2.0
"""What the two CTAs of a pair say to each other; all of it is plain CTA-local code where there is no pair.

CTA 0 leads: it issues the MMAs, and what both must agree on is what it says.

Scope of arrivals at the leader. CTA 1 hands over two things: columns of tensor memory that it has read, which
tcgen05 fences order, and scales in its own shared memory, which the pair's `tcgen05.cp` reads there. Arrivals
and waits keep CTA scope, the default. For the scales PTX's memory model would have cluster scope, which
compiles to MEMBAR.ALL.GPU before each arrival and an L1 invalidation after each wait (ptxas 13, sm_100a), in
every k step of 256 to 512 cycles; on SM90 a like pair of instructions cost 40 % of the kernel. What they
would add is not needed here: each lane's copies have landed (`cp.async.wait_group`) and were passed to the
async proxy (`fence.proxy.async`) before the arrival is issued, they lie in the only place where they are ever
read, and nothing caches shared memory in between.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32
from cutlass.cutlass_dsl import dsl_user_op

from dsv4_gemm_rs.kernels.sm100.config import KernelConfig


@cute.jit
def announce_start(config: Constexpr[KernelConfig]) -> None:
    """Say that this CTA runs, as all of its threads; `wait_for_start` comes next of the pair's barriers."""
    if cutlass.const_expr(config.cluster > 1):
        cute.arch.cluster_arrive_relaxed()


@cute.jit
def wait_for_start(config: Constexpr[KernelConfig]) -> None:
    """Wait until both CTAs run, so that one may touch the other's shared memory."""
    if cutlass.const_expr(config.cluster > 1):
        cute.arch.cluster_wait()


@cute.jit
def meet(config: Constexpr[KernelConfig]) -> None:
    """A barrier over the CTA, or over the pair."""
    if cutlass.const_expr(config.cluster > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


@dsl_user_op
def leaders_word(
    config: Constexpr[KernelConfig], word: cute.Pointer, *, loc: Any = None, ip: Any = None
) -> Int32:
    """The leader's 32-bit word at the place of `word`, after a `meet` that follows its last change.

    PTX, in a pair: `mapa.shared::cluster.u32 r, w, 0;` and `ld.shared::cluster.b32 d, [r];`
    """
    if config.cluster == 1:
        return cute.arch.load(word, Int32, loc=loc, ip=ip)
    value = cute.arch.inline_ptx(
        "{\n\t.reg .b32 remote;\n\tmapa.shared::cluster.u32 remote, {$r0}, 0;\n\t"
        "ld.shared::cluster.b32 {$w0}, [remote];\n\t}",
        write_only_types=[Int32],
        read_only_args=[Int32(word.toint(loc=loc, ip=ip))],
        loc=loc,
        ip=ip,
    )
    return Int32(value)


@dsl_user_op
def arrive_at_leader(
    config: Constexpr[KernelConfig], barrier: cute.Pointer, *, loc: Any = None, ip: Any = None
) -> None:
    """Arrive, as one thread, on the leader's barrier at the place of `barrier`.

    PTX: `mbarrier.arrive.shared.b64`, in a pair after `mapa.shared::cluster` with rank 0, and then
    `.shared::cluster`.
    """
    leader = 0 if config.cluster > 1 else None
    cute.arch.mbarrier_arrive(barrier, leader, loc=loc, ip=ip)
