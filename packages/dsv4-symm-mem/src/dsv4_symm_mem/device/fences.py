# SPDX-License-Identifier: Apache-2.0
"""Fences between proxies and between threads.

Ordinary loads and stores, the async proxy (TMA, bulk copies, wgmma and tcgen05 operands) and
accesses through another virtual address of the same memory reach memory by paths that do not see each other
in order (PTX ISA, Memory Consistency Model, "Proxies"). Release, acquire and barriers order the generic proxy
only; a hand-over between two proxies needs a proxy fence **in addition**, on the side that hands over or
takes over.

None of these waits for anything: a fence after an unfinished bulk copy orders nothing, the copy must have
been waited for first (see `bulk`).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def fence_proxy_async(*, loc: Any = None, ip: Any = None) -> None:
    """Order this thread's generic accesses and those of the async proxy, both ways, in all state spaces.

    PTX, sm_90a and sm_100a: `fence.proxy.async;` (ISA section "membar/fence").

    Used after waiting for bulk copies and before the release of their flag, and after an acquire whose data
    is then read by TMA. Between this thread's view and the proxy only: other threads need a barrier or a
    flag.
    """
    cute.arch.fence_proxy("async", loc=loc, ip=ip)


@dsl_user_op
def fence_proxy_async_global(*, loc: Any = None, ip: Any = None) -> None:
    """`fence_proxy_async` restricted to global memory.

    PTX, sm_90a and sm_100a: `fence.proxy.async.global;` (ISA section "membar/fence").
    """
    cute.arch.fence_proxy("async.global", loc=loc, ip=ip)


@dsl_user_op
def fence_proxy_async_shared(*, loc: Any = None, ip: Any = None) -> None:
    """`fence_proxy_async` restricted to the CTA's shared memory.

    PTX, sm_90a and sm_100a: `fence.proxy.async.shared::cta;` (ISA section "membar/fence").

    Every thread that wrote shared memory runs it, then all meet at a barrier, then one issues the bulk copy.
    """
    cute.arch.fence_proxy("async.shared", space="cta", loc=loc, ip=ip)


@dsl_user_op
def fence_proxy_alias(*, loc: Any = None, ip: Any = None) -> None:
    """Order accesses to the same memory through different virtual addresses: unicast and multicast.

    PTX, sm_90a and sm_100a: `fence.proxy.alias;` (ISA section "membar/fence").

    On the writer's side before the release, on the reader's side after the acquire. A peer's mapping of the
    owner's memory needs none: each device uses one address for it.
    """
    cute.arch.fence_proxy("alias", loc=loc, ip=ip)


@dsl_user_op
def fence_acq_rel_sys(*, loc: Any = None, ip: Any = None) -> None:
    """A fence that makes the strong accesses around it a release and an acquire at system scope.

    PTX, sm_90a and sm_100a: `fence.acq_rel.sys;` (ISA section "membar/fence").

    For accesses that are relaxed by themselves: after polling data with `load_relaxed_16`, or before a
    relaxed store that publishes. System scope, since the other side is another device.
    """
    cute.arch.fence_acq_rel_sys(loc=loc, ip=ip)
