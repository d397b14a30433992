# SPDX-License-Identifier: Apache-2.0
"""Every error that this package raises on purpose, one class per thing a caller can do about it.

An argument error names the argument, its value and what was expected, and is raised before anything is
launched. The package depends on none of its neighbours, hence these few lines of its own.
"""

from __future__ import annotations


class MhcError(Exception):
    """Base of every error raised on purpose by this package."""


class ArgumentError(MhcError, ValueError):
    """A caller's argument is unusable.

    Attributes:
        argument: Name of the parameter as in the public signature.
        value: The offending value, or the part of it that matters (a shape, a dtype), not a whole tensor.
        expected: What would have been accepted.
    """

    def __init__(self, argument: str, value: object, expected: str) -> None:
        self.argument = argument
        self.value = value
        self.expected = expected
        super().__init__(f"{argument}: got {value!r}, expected {expected}")


class UnsupportedError(MhcError, RuntimeError):
    """This device, shape or installation cannot do what was asked; the text says which of them and why."""


class NotCompiledError(MhcError, RuntimeError):
    """A kernel that is not loaded is needed while a CUDA graph is captured; call `warmup` before."""
