# SPDX-License-Identifier: Apache-2.0
"""The exchange protocol: what lies where, what each word means, and an executable model of the rules.

`words` encodes flags and abort words, `layout` places them in symmetric memory, `host` performs the
protocol from the CPU over any arena, `model` explores its interleavings exhaustively. Kernels follow the
same layout and the same rules.
"""
