# SPDX-License-Identifier: Apache-2.0
"""What can go wrong between a compiled host function and the emulator."""

from __future__ import annotations

from dsv4_ptx_emulator.errors import EmulatorError


class RuntimeLibraryError(EmulatorError, RuntimeError):
    """A compiled host function asked for something that the stand-in cannot give."""


class CompilerError(RuntimeLibraryError):
    """The stand-in library could not be built or kept; the text says what to install or to set."""


class UnknownImageError(RuntimeLibraryError):
    """A host function brought a module image whose PTX was not kept.

    It was compiled outside of the emulator's environment, so that there is machine code only.
    """
