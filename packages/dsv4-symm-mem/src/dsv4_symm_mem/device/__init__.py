# SPDX-License-Identifier: Apache-2.0
"""What a kernel calls: flags, vectors, multicast, bulk copies, fences, each with its PTX and ordering.

All are called from inside `@cute.kernel` or `@cute.jit` code, take global addresses as `Int64`, and compile
for sm_90a and sm_100a. Importing this package imports CuTe DSL; nothing else of `dsv4_symm_mem` does.
"""

from __future__ import annotations

from dsv4_symm_mem.device.address import global_pointer
from dsv4_symm_mem.device.bulk import (
    bulk_commit,
    bulk_load,
    bulk_prefetch,
    bulk_store,
    bulk_wait,
    bulk_wait_read,
)
from dsv4_symm_mem.device.clock import deadline_after, globaltimer, nanosleep, smid
from dsv4_symm_mem.device.fences import (
    fence_acq_rel_sys,
    fence_proxy_alias,
    fence_proxy_async,
    fence_proxy_async_global,
    fence_proxy_async_shared,
)
from dsv4_symm_mem.device.flags import (
    PLAIN_POLLS,
    SLEEP_NS,
    WaitStatus,
    abort_word,
    arrive_ticket,
    load_acquire,
    load_relaxed,
    raise_abort,
    store_relaxed,
    store_release,
    wait_signal,
)
from dsv4_symm_mem.device.multimem import (
    multimem_ld_reduce_bf16,
    multimem_red_add_release,
    multimem_store,
    multimem_store_release,
)
from dsv4_symm_mem.device.vectors import (
    Words,
    add_bf16,
    load_16,
    load_32,
    load_relaxed_16,
    load_shared_16,
    pack_bf16,
    store_16,
    store_32,
    store_relaxed_16,
    store_shared_16,
    unpack_bf16,
)

__all__ = [
    "PLAIN_POLLS",
    "SLEEP_NS",
    "WaitStatus",
    "Words",
    "abort_word",
    "add_bf16",
    "arrive_ticket",
    "bulk_commit",
    "bulk_load",
    "bulk_prefetch",
    "bulk_store",
    "bulk_wait",
    "bulk_wait_read",
    "deadline_after",
    "fence_acq_rel_sys",
    "fence_proxy_alias",
    "fence_proxy_async",
    "fence_proxy_async_global",
    "fence_proxy_async_shared",
    "global_pointer",
    "globaltimer",
    "load_16",
    "load_32",
    "load_acquire",
    "load_relaxed",
    "load_relaxed_16",
    "load_shared_16",
    "multimem_ld_reduce_bf16",
    "multimem_red_add_release",
    "multimem_store",
    "multimem_store_release",
    "nanosleep",
    "pack_bf16",
    "raise_abort",
    "smid",
    "store_16",
    "store_32",
    "store_relaxed",
    "store_relaxed_16",
    "store_release",
    "store_shared_16",
    "unpack_bf16",
    "wait_signal",
]
