# SPDX-License-Identifier: Apache-2.0
"""Host tensors that say they are on a CUDA device, for compiled functions that take tensors.

A compiled host function checks the device of a tensor argument before anything of ours is called. DLPack lets
the producer say where a tensor is, so `on_device` passes the host's tensor on with another device in its
description: device type 2 (kDLCUDA) and the rank as its number. Everything else (address, shape, strides) is
the producer's own.

Layouts: dlpack.h, `DLManagedTensor` and, from DLPack 1.0, `DLManagedTensorVersioned`.
"""

from __future__ import annotations

import ctypes
from typing import Any

CUDA = 2
"""kDLCUDA."""

_DEVICE_OFFSETS = {b"dltensor": 8, b"dltensor_versioned": 40}
"""Where `DLTensor.device` is: behind `data`; versioned, also behind version, context, deleter and flags."""

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype = ctypes.c_char_p
_name_of.argtypes = [ctypes.py_object]


class DeviceTensor:
    """A host tensor that claims to be on a CUDA device; made by `on_device`."""

    def __init__(self, tensor: Any, rank: int) -> None:
        self.host = tensor
        self.rank = rank

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.rank

    def __dlpack__(self, **options: Any) -> Any:
        # A consumer names its stream, which the host's tensor knows nothing of.
        options.pop("stream", None)
        options.pop("dl_device", None)
        capsule = self.host.__dlpack__(**options)
        name = _name_of(capsule)
        device = ctypes.cast(
            _pointer_of(capsule, name) + _DEVICE_OFFSETS[name], ctypes.POINTER(ctypes.c_int32)
        )
        device[0], device[1] = CUDA, self.rank
        return capsule


def on_device(tensor: Any, rank: int = 0) -> DeviceTensor:
    """`tensor` as an argument for a compiled function on the device of `rank`.

    Args:
        tensor: A torch tensor on the CPU or a NumPy array; anything with `__dlpack__`.
        rank: Number of the device to claim.
    """
    return DeviceTensor(tensor, rank)
