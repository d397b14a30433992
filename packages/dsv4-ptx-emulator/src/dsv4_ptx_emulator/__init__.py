# SPDX-License-Identifier: Apache-2.0
"""Runs the PTX of compiled CUDA kernels on a CPU, several GPUs at once, and checks what they do.

`emulator.Emulator` takes PTX and explicit parameters, `runtime.system.System` compiled host functions.
Importing this package costs nothing, since pytest does so wherever it is installed.
"""

from __future__ import annotations

from dsv4_ptx_emulator._version import __version__

__all__ = ["__version__"]
