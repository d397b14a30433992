# SPDX-License-Identifier: Apache-2.0
"""The kernels, one a file, each a function from its compile-time parameters to a TileLang function.

These modules import TileLang; nothing else of the package does before a kernel is needed.

What is common to them. The number of tokens is never a compile-time parameter. A tensor that a variant does
not have is declared like the residual and given the residual, which the kernel then never touches: one
argument list for all variants, and no placeholder to allocate. Every function computes in FP32 and rounds
where `dsv4_mhc.reference` does.

Traps of TileLang 0.1.15 found here. Annotations of a TileLang function are evaluated with its closure, so
these modules have no `from __future__ import annotations`. One `T.Tensor` object in two annotations is one
parameter. A `T.serial(start, stop, step)` whose range may be empty loses its guard. x * 0 is simplified to 0,
NaN or not. An unrolled `if i == q: a[q] += x` becomes an indexed array in local memory; a select does not.
"""
