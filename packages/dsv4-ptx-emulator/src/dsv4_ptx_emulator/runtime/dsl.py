# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL set up to compile for the emulator, and the PTX of what it compiled.

Contract: inside of `compiling`, whatever the DSL compiles is linked against the stand-in, for the given
architecture, and its PTX can afterwards be looked up by the machine code that its host function carries. On
leaving the DSL's settings are as they were.

Trap: of the DSL's run-time library and the stand-in, whichever a process loads first serves every host
function that is linked later. So a process that has run any compiled host function of the DSL cannot compile
for the emulator any more, which is refused here, and one that has used the emulator cannot use a GPU.

The DSL's settings (`CUTE_DSL_LIBS`, `CUTE_DSL_ARCH`, `CUTE_DSL_KEEP`, `CUTE_DSL_DUMP_DIR`) are environment
variables that it reads when it is imported and remembers for the life of the process. Here the object that
holds what was read is exchanged for a copy with other values. The variables themselves would have to be set
before the first import of the DSL, by whoever comes first in a process, and could not be taken back.

How PTX is found: a host function holds a cubin only, in a fat binary; no option makes the DSL put PTX there
(`cubin-format` is accepted and ignored). So the DSL keeps both, and a cubin's SHA-256 is the key to its PTX.

Host functions are compiled for TVM-FFI whether or not that was asked for: the others load and launch through
the CUDA driver's own Python bindings.

Trap: the DSL names what it keeps after the host function, and two kernels of one class have the same name:
the later overwrites the earlier. So each reading of the folder's name gives a new folder.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsv4_ptx_emulator.runtime.errors import RuntimeLibraryError, UnknownImageError

FAT_MAGIC = 0xBA55ED50
ELF_KIND = 2
ELF_MAGIC = b"\x7fELF"

REAL_LIBRARY = "libcute_dsl_runtime.so"
"""The DSL's run-time library."""

_changing = threading.RLock()
_stand_in_first: set[Path] = set()
"""The stand-in, once a compilation for the emulator has begun before the real library was loaded."""


class PtxStore:
    """PTX texts by the SHA-256 of the cubin that was assembled from them."""

    def __init__(self) -> None:
        self._texts: dict[bytes, str] = {}
        self._folders: list[Path] = []
        self._root: Path | None = None

    def new_folder(self) -> Path:
        """An empty folder for the DSL to keep one compilation's results in."""
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="dsv4-ptx-emulator-"))
        folder = Path(tempfile.mkdtemp(dir=self._root))
        self._folders.append(folder)
        return folder

    def collect(self) -> None:
        """Take in what the DSL has kept since the last time, and remove the files."""
        for folder in self._folders:
            for cubin in sorted(folder.rglob("*.cubin")):
                ptx = cubin.with_suffix(".ptx")
                if ptx.exists():  # not where the compilation failed in between
                    self.add(cubin.read_bytes(), ptx.read_text(encoding="utf-8"))
        self._folders.clear()
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None

    def add(self, cubin: bytes, ptx: str) -> None:
        """Remember the PTX of a cubin."""
        self._texts[hashlib.sha256(cubin).digest()] = ptx

    def find(self, image: bytes) -> str:
        """The PTX of a module image: PTX itself, a cubin, or a fat binary that holds one.

        Raises:
            UnknownImageError: Nothing was kept for it.
        """
        if not image.startswith((ELF_MAGIC, struct.pack("<I", FAT_MAGIC))):
            return image.rstrip(b"\0").decode("utf-8")
        with _changing:  # not while another thread compiles: its folder is not complete
            self.collect()
        payloads = [image] if image.startswith(ELF_MAGIC) else cubins_of(image)
        for payload in payloads:
            if text := self._texts.get(hashlib.sha256(payload).digest()):
                return text
        raise UnknownImageError(
            "a host function brought machine code whose PTX was not kept: compile it inside of "
            "`Runtime.compiling()`, which has the DSL keep both"
        )


def image_bytes(read: Any, address: int) -> bytes:
    """The module image at `address`, whose size only its header tells.

    Args:
        read: `read(address, size) -> bytes`.
        address: Where it begins.

    Raises:
        RuntimeLibraryError: It is neither a fat binary nor PTX.
    """
    (magic,) = struct.unpack("<I", read(address, 4))
    if magic == FAT_MAGIC:
        header, body = struct.unpack("<HQ", read(address + 6, 10))
        return bytes(read(address, header + body))
    raise RuntimeLibraryError(f"a module image begins with {magic:#010x}, which is no fat binary")


def cubins_of(fat_binary: bytes) -> list[bytes]:
    """The uncompressed cubins of a fat binary.

    The format is undocumented; as seen in what DSL 4.8 writes: a header of 16 bytes (magic, version u16,
    header size u16, body size u64), then entries with kind u16 (2: ELF) at 0, their header's size u32 at 4
    and the payload's size u64 at 8, each padded to 8 bytes.
    """
    header, body = struct.unpack_from("<HQ", fat_binary, 6)
    found = []
    position, end = header, header + body
    while position + 16 <= end:
        kind, _, entry_header, size = struct.unpack_from("<HHIQ", fat_binary, position)
        start = position + entry_header
        payload = fat_binary[start : start + size]
        if kind == ELF_KIND:
            found.append(payload)
        position = start + (size + 7) // 8 * 8
    return found


@contextmanager
def compiling(library: Path, arch: str, store: PtxStore) -> Iterator[None]:
    """Have the CuTe DSL compile for the emulator inside of this context.

    Args:
        library: The stand-in, see `library.stand_in_library`.
        arch: Such as "sm_90a".
        store: Where the PTX goes.

    Raises:
        RuntimeLibraryError: The DSL is not installed, or not in a version whose settings are understood, or
            its own run-time library was loaded before.
    """
    with _changing:
        if not _stand_in_first and _is_loaded(REAL_LIBRARY):
            raise RuntimeLibraryError(
                f"{REAL_LIBRARY} was loaded in this process before and would get the launches: a compiled "
                "host function has run here; emulate in a fresh process"
            )
        _stand_in_first.add(library)
        owner = _dsl()
        before = owner.envar
        owner.envar = _settings(before, library, arch, store)
        try:
            yield
        finally:
            owner.envar = before
            store.collect()


def load_first(library: Path) -> bool:
    """Load the stand-in before the DSL's own run-time library, for all that is linked later in this process.

    To be called where no GPU is going to be used, before the DSL compiles anything.

    Returns:
        Whether it came first.
    """
    with _changing:
        if not _stand_in_first and _is_loaded(REAL_LIBRARY):
            return False
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        _stand_in_first.add(library)
    return True


def _is_loaded(name: str) -> bool:
    """Whether this process has mapped a library of that file name; False where the system does not say."""
    try:
        mappings = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return any(line.rstrip().endswith(f"/{name}") for line in mappings.splitlines())


def _dsl() -> Any:
    try:
        from cutlass.cutlass_dsl import CuTeDSL
    except ImportError as error:
        raise RuntimeLibraryError(
            f"compiled host functions need the CuTe DSL ({error}): pip install 'dsv4-ptx-emulator[dsl]'"
        ) from None
    return CuTeDSL._get_dsl()


def _settings(before: Any, library: Path, arch: str, store: PtxStore) -> Any:
    missing = [
        name
        for name in ("shared_libs", "keep_ptx", "keep_cubin", "dump_dir", "enable_tvm_ffi")
        if not hasattr(before, name)
    ]
    if missing:
        raise RuntimeLibraryError(f"this version of the CuTe DSL has no setting {', '.join(missing)}")

    class Settings(type(before)):  # type: ignore[misc]
        """The DSL's settings, with a folder of its own for every compilation."""

        @property
        def dump_dir(self) -> str:
            return str(store.new_folder())

    settings = copy.copy(before)
    # A property is found before an instance's attribute, which could not be set any more.
    settings.__dict__.pop("dump_dir", None)
    settings.__class__ = Settings
    settings.shared_libs = str(library)
    settings.keep_ptx = settings.keep_cubin = True
    settings.enable_tvm_ffi = True
    settings.arch = arch
    return settings
