# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections of DeepSeek V4 and V4.1: one launch between two sublayers.

Importing this package registers `torch.ops.dsv4_mhc.*`; it needs no GPU and does not import TileLang, which
the first launch on a GPU, `warmup` and `dsv4-mhc compile` do.
"""

from __future__ import annotations

from dsv4_mhc._version import __version__
from dsv4_mhc.compile import warmup
from dsv4_mhc.errors import ArgumentError, MhcError, NotCompiledError, UnsupportedError
from dsv4_mhc.ops.collapse import Tail, collapse, tail
from dsv4_mhc.ops.engram import engram_seam
from dsv4_mhc.ops.expand import expand
from dsv4_mhc.ops.head import head
from dsv4_mhc.ops.mean import stream_mean
from dsv4_mhc.ops.post import post
from dsv4_mhc.ops.seam import Seam, pre, seam
from dsv4_mhc.plan import Quant
from dsv4_mhc.reference import first_pre
from dsv4_mhc.weights import pack_weight

__all__ = [
    "ArgumentError",
    "MhcError",
    "NotCompiledError",
    "Quant",
    "Seam",
    "Tail",
    "UnsupportedError",
    "__version__",
    "collapse",
    "engram_seam",
    "expand",
    "first_pre",
    "head",
    "pack_weight",
    "post",
    "pre",
    "seam",
    "stream_mean",
    "tail",
    "warmup",
]
