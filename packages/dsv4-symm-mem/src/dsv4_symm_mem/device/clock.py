# SPDX-License-Identifier: Apache-2.0
"""Time and place on the device: the clock of deadlines, sleeping between polls, the number of the SM.

Deadlines use `%globaltimer`, not `%clock64`: the latter counts cycles of one SM, at a frequency that changes,
and cannot be turned into the seconds that a caller configures. PTX calls `%globaltimer` a register for tools
and leaves its resolution open (ISA section "Special Registers: %globaltimer"), so it is fit for deadlines of
milliseconds and unfit for measuring a kernel.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def globaltimer(*, loc: Any = None, ip: Any = None) -> Int64:
    """Nanoseconds of the device-wide timer; orders nothing.

    PTX, sm_90a and sm_100a: `mov.u64 d, %globaltimer;`
    """
    return cute.arch.globaltimer(loc=loc, ip=ip)


@cute.jit
def deadline_after(timeout_ns: Int64) -> Int64:
    """The `globaltimer` value `timeout_ns` from now, or 0 (no deadline) for 0.

    Take it once at the start of a kernel: the waits of one call then share one deadline instead of each
    having the whole timeout.

    PTX, sm_90a and sm_100a: `mov.u64 d, %globaltimer;` and integer instructions.
    """
    deadline = Int64(0)
    if timeout_ns != Int64(0):
        deadline = globaltimer() + timeout_ns
    return deadline


@dsl_user_op
def nanosleep(duration_ns: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Suspend the thread for between 0 and twice `duration_ns`, at most 1 ms; orders nothing.

    PTX, sm_90a and sm_100a: `nanosleep.u32 t;` (ISA section "Miscellaneous Instructions: nanosleep").
    """
    nvvm.nanosleep(Int32(duration_ns).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)


@dsl_user_op
def smid(*, loc: Any = None, ip: Any = None) -> Int32:
    """The number of the SM that runs the thread, for traces only: it may change while a kernel runs.

    PTX, sm_90a and sm_100a: `mov.u32 d, %smid;` (ISA section "Special Registers: %smid").
    """
    return cute.arch.smid(loc=loc, ip=ip)
