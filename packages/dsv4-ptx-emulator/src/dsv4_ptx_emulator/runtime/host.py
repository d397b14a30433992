# SPDX-License-Identifier: Apache-2.0
"""The Python end of the stand-in library: what compiled host functions of this process load and launch.

Contract: one table per process, as the library's is. It knows modules and kernels by handle, parses a
module's PTX once, and turns a launch into a `HostLaunch`, which goes to the receiver of the calling thread
(`receiving`). Nothing is executed here.

An exception must not cross C. It is kept, the host function gets an error code and raises a `RuntimeError`
with the exception's text, and `reraise` gives back the original.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from dsv4_ptx_emulator.errors import EmulatorError, ResourceLimitError
from dsv4_ptx_emulator.ptx.module import Kernel, Module
from dsv4_ptx_emulator.ptx.parser import parse
from dsv4_ptx_emulator.runtime.dsl import PtxStore, compiling, image_bytes
from dsv4_ptx_emulator.runtime.errors import RuntimeLibraryError
from dsv4_ptx_emulator.runtime.library import stand_in_library

FAILED = 999
"""cudaErrorUnknown: what a host function gets when Python raised; the text is ours."""
PORTABLE_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory that a kernel may have without asking for more."""

# CUDA runtime API, cudaLaunchAttributeID.
ATTRIBUTE_COOPERATIVE, ATTRIBUTE_CLUSTER, ATTRIBUTE_PDL = 2, 4, 6
# cudaFuncAttribute.
KERNEL_MAX_DYNAMIC_SHARED, KERNEL_NON_PORTABLE_CLUSTER = 8, 14
# CUfunction_attribute.
KERNEL_STATIC_SHARED = 1

_pointer, _i32 = ctypes.c_void_p, ctypes.c_int32
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "load": (ctypes.POINTER(_pointer), _pointer),
    "get_kernel": (ctypes.POINTER(_pointer), _pointer, ctypes.c_char_p),
    "launch": (_pointer, _pointer, ctypes.POINTER(_pointer)),
    "device_attribute": (ctypes.POINTER(_i32), _i32, _i32),
    "kernel_attribute": (ctypes.POINTER(_i32), _i32, _pointer, _i32),
    "set_kernel_attribute": (_pointer, _i32, _i32, _i32),
    "get_device": (ctypes.POINTER(_i32),),
    "set_device": (_i32,),
}
_TYPES = {name: ctypes.CFUNCTYPE(_i32, *types) for name, types in _SIGNATURES.items()}
# The text has to live on; a returned c_char_p would be freed with the callback's frame.
_TYPES["message"] = ctypes.CFUNCTYPE(_pointer, _i32)


class _Callbacks(ctypes.Structure):
    _fields_ = tuple(_TYPES.items())


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", _i32), ("padding", _i32), ("value", ctypes.c_uint32 * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", _pointer),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class HostLaunch:
    """A launch as the host function asked for it.

    Attributes:
        text: PTX of the module.
        entry: The kernel's symbol.
        grid: CTAs in x, y, z.
        block: Threads of a CTA in x, y, z.
        cluster: CTAs of a cluster in x, y, z; ones where none was asked for.
        shared_bytes: Dynamic shared memory.
        parameters: The parameter block, laid out as the kernel declares it.
        stream: The stream's handle.
        pdl: Whether it may begin before its predecessor has ended (programmatic stream serialization).
    """

    text: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    parameters: bytes
    stream: int
    pdl: bool


class Receiver(Protocol):
    """Where launches of a thread go: one rank's device."""

    @property
    def index(self) -> int:
        """Number of the device."""
        ...

    def attribute(self, attribute: int) -> int:
        """A `cudaDeviceAttr`; raises `RuntimeLibraryError` for one that has no emulated value."""
        ...

    def receive(self, launch: HostLaunch) -> None:
        """Take a launch."""
        ...


@dataclass
class _LoadedKernel:
    text: str
    module: Module
    kernel: Kernel
    settings: dict[int, int] = field(default_factory=dict)


class HostTable:
    """Modules, kernels and receivers of this process; made by `host_table`."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self.store = PtxStore()
        self._lock = threading.RLock()
        self._texts: list[str] = []
        self._parsed: dict[str, Module] = {}
        self._kernels: list[_LoadedKernel] = []
        self._here = threading.local()
        self._message = ctypes.create_string_buffer(b"")
        methods: dict[str, Callable[..., int]] = {
            name: self._guarded(getattr(self, f"_{name}")) for name in _SIGNATURES
        }
        methods["message"] = self._error_message
        self._callbacks = _Callbacks(*(kind(methods[name]) for name, kind in _TYPES.items()))
        self._library = ctypes.CDLL(str(library))
        self._library.dsv4_emulator_install(ctypes.byref(self._callbacks))

    @contextmanager
    def compiling(self, arch: str) -> Iterator[None]:
        """The CuTe DSL compiles for `arch` and this table inside of this context."""
        with compiling(self.library, arch, self.store):
            yield

    @contextmanager
    def receiving(self, receiver: Receiver) -> Iterator[None]:
        """Launches that this thread makes inside of this context go to `receiver`."""
        before = getattr(self._here, "receiver", None)
        self._here.receiver = receiver
        self._here.error = None
        try:
            yield
        finally:
            self._here.receiver = before

    def reraise(self, reported: BaseException) -> None:
        """Raise what a failed call of this thread has kept, in place of what was `reported`."""
        error: BaseException | None = getattr(self._here, "error", None)
        self._here.error = None
        if error is not None and error is not reported:
            raise error from None

    def parsed(self, text: str) -> Module:
        """The module of a PTX text, parsed once."""
        with self._lock:
            if text not in self._parsed:
                self._parsed[text] = parse(text)
            return self._parsed[text]

    def _guarded(self, method: Callable[..., None]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            try:
                method(*arguments)
            except BaseException as error:  # must not cross C; raised again by `reraise`
                self._here.error = error
                return FAILED
            return 0

        return call

    def _receiver(self) -> Receiver:
        receiver: Receiver | None = getattr(self._here, "receiver", None)
        if receiver is None:
            raise RuntimeLibraryError("no emulated device takes what this thread calls")
        return receiver

    def _error_message(self, code: int) -> int:
        error = getattr(self._here, "error", None)
        text = f"emulator: {type(error).__name__}: {error}" if error is not None else f"CUDA error {code}"
        self._message = ctypes.create_string_buffer(text.encode())
        return ctypes.addressof(self._message)

    def _load(self, library: Any, image: int) -> None:
        text = self.store.find(image_bytes(ctypes.string_at, image))
        self.parsed(text)
        with self._lock:
            self._texts.append(text)
            library[0] = len(self._texts)

    def _get_kernel(self, handle: Any, library: int, name: bytes) -> None:
        text = self._texts[library - 1]
        module = self.parsed(text)
        kernel = module.kernels.get(name.decode())
        if kernel is None:
            raise RuntimeLibraryError(f"the module has no kernel {name.decode()!r}")
        with self._lock:
            self._kernels.append(_LoadedKernel(text, module, kernel))
            handle[0] = len(self._kernels)

    def _launch(self, config: int, handle: int, arguments: Any) -> None:
        receiver = self._receiver()
        loaded = self._kernels[handle - 1]
        asked = _LaunchConfig.from_address(config)
        attributes = {
            asked.attributes[index].id: tuple(asked.attributes[index].value[:3])
            for index in range(asked.attribute_count)
        }
        unknown = set(attributes) - {ATTRIBUTE_COOPERATIVE, ATTRIBUTE_CLUSTER, ATTRIBUTE_PDL}
        if unknown:
            raise RuntimeLibraryError(f"launch attribute {min(unknown)} has no emulated meaning")
        allowed = max(loaded.settings.get(KERNEL_MAX_DYNAMIC_SHARED, 0), PORTABLE_SHARED_BYTES)
        if asked.shared_bytes > allowed:
            raise ResourceLimitError(
                f"{loaded.kernel.name}: {asked.shared_bytes} bytes of dynamic shared memory, of {allowed}"
            )
        receiver.receive(
            HostLaunch(
                text=loaded.text,
                entry=loaded.kernel.name,
                grid=_triple(asked.grid),
                block=_triple(asked.block),
                cluster=_triple(attributes.get(ATTRIBUTE_CLUSTER, (1, 1, 1))),
                shared_bytes=asked.shared_bytes,
                parameters=_parameter_block(loaded.kernel, arguments),
                stream=asked.stream or 0,
                pdl=bool(attributes.get(ATTRIBUTE_PDL, (0,))[0]),
            )
        )

    def _device_attribute(self, value: Any, attribute: int, device: int) -> None:
        value[0] = self._receiver().attribute(attribute)

    def _kernel_attribute(self, value: Any, attribute: int, handle: int, device: int) -> None:
        if attribute != KERNEL_STATIC_SHARED:
            raise RuntimeLibraryError(f"kernel attribute {attribute} has no emulated value")
        value[0] = static_shared_bytes(self._kernels[handle - 1])

    def _set_kernel_attribute(self, handle: int, attribute: int, value: int, device: int) -> None:
        if attribute not in (KERNEL_MAX_DYNAMIC_SHARED, KERNEL_NON_PORTABLE_CLUSTER):
            raise RuntimeLibraryError(f"kernel attribute {attribute} has no emulated meaning")
        self._kernels[handle - 1].settings[attribute] = value

    def _get_device(self, device: Any) -> None:
        device[0] = self._receiver().index

    def _set_device(self, device: int) -> None:
        if device != self._receiver().index:
            raise RuntimeLibraryError(f"device {device} is not the one whose launches this thread makes")


@cache
def host_table() -> HostTable:
    """The table of this process; builds the stand-in library at first use.

    Raises:
        CompilerError: It could not be built.
    """
    return HostTable(stand_in_library())


def static_shared_bytes(loaded: _LoadedKernel) -> int:
    """Bytes of shared memory that a kernel's module declares with a size."""
    used = 0
    for variable in (*loaded.module.variables, *loaded.kernel.variables):
        if variable.space == "shared" and variable.size:
            used = -(-used // variable.align) * variable.align + variable.size
    return used


def _triple(values: Any) -> tuple[int, int, int]:
    x, y, z = (int(value) for value in values)
    return x, y, z


def _parameter_block(kernel: Kernel, arguments: Any) -> bytes:
    block = bytearray(kernel.parameter_bytes)
    for index, parameter in enumerate(kernel.parameters):
        value = ctypes.string_at(arguments[index], parameter.size)
        block[parameter.offset : parameter.offset + parameter.size] = value
    return bytes(block)


__all__ = ["EmulatorError", "HostLaunch", "HostTable", "Receiver", "host_table"]
