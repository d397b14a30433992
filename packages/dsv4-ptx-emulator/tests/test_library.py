# SPDX-License-Identifier: Apache-2.0
"""The stand-in library: built once, kept privately, and a clear error where it cannot be."""

from __future__ import annotations

import ctypes
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dsv4_ptx_emulator.runtime import library
from dsv4_ptx_emulator.runtime.errors import CompilerError
from dsv4_ptx_emulator.runtime.library import CACHE_VARIABLE, default_cache, stand_in_library

needs_compiler = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())
NEEDED = (
    "_cudaLibraryLoadData",
    "_cudaLibraryGetKernel",
    "_cudaLaunchKernelEx",
    "_cudaKernelSetAttributeForDevice",
    "_cudaFuncSetAttribute",
    "_cuKernelGetAttribute",
    "_cudaDeviceGetAttribute",
    "_cudaGetDevice",
    "_cudaSetDevice",
    "cuda_dialect_init_library_once",
    "cuda_dialect_unload_library_once",
    "cuda_dialect_get_error_name",
    "CuteDSLRT_TVMFFISetRaisedCudaError",
)


@needs_compiler
def test_built_once_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "a" / "cache"
    first = stand_in_library(cache)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert stand_in_library(cache) == first
    assert list(cache.iterdir()) == [first]


@needs_compiler
def test_exports_what_a_host_function_needs(tmp_path: Path) -> None:
    loaded = ctypes.CDLL(str(stand_in_library(tmp_path / "cache")))
    assert all(hasattr(loaded, name) for name in NEEDED)
    # Nobody has installed callbacks in this copy: an error, not a call through a null pointer.
    assert loaded._cudaSetDevice(0) == 3


@needs_compiler
def test_concurrent_builds_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = set(pool.map(lambda _: stand_in_library(tmp_path / "cache"), range(3)))
    assert len(found) == 1
    assert sorted((tmp_path / "cache").iterdir()) == sorted(found)


@needs_compiler
def test_another_source_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stand_in_library(tmp_path / "cache")
    changed = tmp_path / "changed.c"
    changed.write_bytes(library.SOURCE.read_bytes() + b"\n/* changed */\n")
    monkeypatch.setattr(library, "SOURCE", changed)
    assert stand_in_library(tmp_path / "cache") != first


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerError, match="no C compiler"):
        stand_in_library(tmp_path / "cache")


@needs_compiler
def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("int broken(", encoding="utf-8")
    monkeypatch.setattr(library, "SOURCE", broken)
    with pytest.raises(CompilerError, match=r"broken\.c"):
        stand_in_library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    with pytest.raises(CompilerError, match="does not start"):
        stand_in_library(tmp_path / "cache")


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(CompilerError, match=CACHE_VARIABLE):
        stand_in_library(folder)
    with pytest.raises(CompilerError, match=CACHE_VARIABLE):
        stand_in_library(Path(os.devnull) / "cache")


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    assert default_cache() == tmp_path / ".cache" / "dsv4-ptx-emulator"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache() == tmp_path / "xdg" / "dsv4-ptx-emulator"
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "chosen"))
    assert default_cache() == tmp_path / "chosen"
