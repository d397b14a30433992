# SPDX-License-Identifier: Apache-2.0
"""Artefacts as files: the format, the key, who is trusted, what happens at once, what is cleaned up."""

from __future__ import annotations

import fcntl
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
from dsv4_symm_mem.artefacts import key as key_module
from dsv4_symm_mem.artefacts.container import Artefact, DamagedError, pack, unpack
from dsv4_symm_mem.artefacts.folder import UNFINISHED, CacheFolder, default_folder
from dsv4_symm_mem.artefacts.key import ArtefactKey, artefact_key, is_current, kernel_name, source_digest

ARTEFACT = Artefact(b"\x7fELF" + bytes(range(256)), ".target sm_90a", {"arch": "sm_90a", "cubin": [4, 8]})


def test_a_packed_artefact_comes_back() -> None:
    content = pack(ARTEFACT)
    assert content.startswith(ARTEFACT.object)
    assert unpack(content) == ARTEFACT
    assert unpack(content).cubin == bytes(range(8))


def test_no_bit_may_differ_and_no_byte_be_missing() -> None:
    content = pack(ARTEFACT)
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1
        with pytest.raises(DamagedError):
            unpack(bytes(changed))
    for length in (*range(64), len(content) // 2, len(content) - 1):
        with pytest.raises(DamagedError):
            unpack(content[:length])
    with pytest.raises(DamagedError):
        unpack(content + b"\0")


def test_the_key_changes_with_whatever_the_code_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package_of_kernels"
    package.mkdir()
    source = package / "__init__.py"
    source.write_text("A = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest(kernel: object = ("k", 1), arch: str = "sm_90a") -> str:
        key_module._package_digest.cache_clear()
        key_module._tools.cache_clear()
        return artefact_key(kernel, arch, [package.name]).digest

    first = digest()
    assert digest() == first
    different = [digest(("k", 2)), digest(arch="sm_100a")]
    source.write_text("A = 2\n", encoding="utf-8")
    different.append(digest())
    (package / "more.py").write_text("", encoding="utf-8")
    different.append(digest())
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    different.append(digest())
    monkeypatch.setattr(metadata, "version", lambda name: f"{name} of tomorrow")
    different.append(digest())
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    different.append(digest())
    assert len({first, *different}) == 1 + len(different)
    last = digest()
    monkeypatch.setenv("CUTE_DSL_LOG_LEVEL", "10")
    monkeypatch.setenv("CUTE_DSL_LIBS", "/somewhere/else.so")
    assert digest() == last
    monkeypatch.undo()
    key_module._tools.cache_clear()
    key_module._package_digest.cache_clear()


def test_sources_are_told_apart_by_their_names_too(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x", encoding="utf-8")
    first = source_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    assert source_digest(tmp_path) == first
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert source_digest(tmp_path) != first


def test_what_was_made_from_other_sources_is_not_current() -> None:
    facts = dict(artefact_key("k", "sm_90a", ["dsv4_symm_mem"]).facts)
    assert is_current({**facts, "cubin": [0, 0]})
    assert not is_current({**facts, "dsl": "0"})
    assert not is_current({**facts, "sources": {"dsv4_symm_mem": "0"}})
    assert not is_current({**facts, "sources": {"no_such_package": "0"}})


def test_names_are_fit_for_files() -> None:
    assert kernel_name(("gemm", "Config(m=1, n='../x')")) == "gemm-Config-m-1-n-..-x"
    key = ArtefactKey("k-sm_90a", {"a": 1})
    assert key.file_name == f"k-sm_90a-{key.digest[:24]}.o"


def test_a_new_folder_and_its_files_are_private(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path / "a" / "b")
    assert cache.obstacle == cache.read_only == ""
    path = cache.write("x.o", ARTEFACT)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    assert cache.read("x.o") == ARTEFACT
    assert [file.name for file in (tmp_path / "a" / "b").iterdir()] == ["x.o"]
    with pytest.raises(FileNotFoundError):
        cache.read("y.o")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    cache = CacheFolder(tmp_path)
    assert "others may write" in cache.obstacle
    assert cache.read_only == cache.obstacle
    assert cache.entries() == []
    tmp_path.chmod(0o755)
    assert not CacheFolder(tmp_path).obstacle


def test_what_belongs_to_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CacheFolder(tmp_path)
    path = cache.write("x.o", ARTEFACT)
    stranger = os.geteuid() + 4711
    if os.geteuid() == 0:
        os.chown(path, stranger, -1)
        os.chown(tmp_path, stranger, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(DamagedError, match="another user"):
        cache.read("x.o")
    assert "another user" in CacheFolder(tmp_path).obstacle


def test_links_pipes_and_files_that_others_may_write_are_not_read(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path)
    real = cache.write("x.o", ARTEFACT)
    (tmp_path / "link.o").symlink_to(real)
    os.mkfifo(tmp_path / "pipe.o", 0o600)
    (tmp_path / "folder.o").mkdir()
    for name in ("link.o", "pipe.o", "folder.o"):
        with pytest.raises(DamagedError):
            cache.read(name)
    real.chmod(0o620)
    with pytest.raises(DamagedError, match="others may write"):
        cache.read("x.o")


def test_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("DSV4_CACHE_DIR", raising=False)
    assert default_folder() == tmp_path / ".cache" / "dsv4"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_folder() == Path("/caches/dsv4")
    monkeypatch.setenv("DSV4_CACHE_DIR", " /chosen ")
    assert default_folder() == Path("/chosen")
    monkeypatch.setenv("DSV4_CACHE_DIR", "OFF")
    assert default_folder() is None
    assert "DSV4_CACHE_DIR is off" in CacheFolder(None).obstacle


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path)
    paths = [cache.write(f"{number}.o", ARTEFACT) for number in range(4)]
    for age, path in enumerate(paths):
        os.utime(path, (1000 - age, 1000 - age))
    cache.read("3.o")
    assert [entry.path.name for entry in cache.entries()] == ["3.o", "0.o", "1.o", "2.o"]
    assert cache.trim(2 * paths[0].stat().st_size) == [paths[1], paths[2]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.o", "3.o"]


def test_what_dead_writers_left_is_removed(tmp_path: Path) -> None:
    fresh, stale = tmp_path / f"{UNFINISHED}fresh", tmp_path / f"{UNFINISHED}stale"
    fresh.touch()
    stale.touch()
    os.utime(stale, (0, 0))
    CacheFolder(tmp_path).write("x.o", ARTEFACT)
    assert fresh.exists()
    assert not stale.exists()


def test_reading_writing_and_cleaning_up_at_once(tmp_path: Path) -> None:
    size = len(pack(ARTEFACT))
    until = time.monotonic() + 0.5

    def work(number: int) -> int:
        cache, reads = CacheFolder(tmp_path), 0
        while time.monotonic() < until:
            cache.write(f"{number % 3}.o", ARTEFACT)
            with suppress(FileNotFoundError):
                assert cache.read(f"{(number + 1) % 3}.o") == ARTEFACT
                reads += 1
            cache.trim(size if number % 2 else 0)
        return reads

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) > 0
    assert not list(tmp_path.glob(f"{UNFINISHED}*"))


def test_a_lock_excludes_and_is_given_up_after_a_while(tmp_path: Path) -> None:
    cache, other = CacheFolder(tmp_path), CacheFolder(tmp_path)
    with cache.lock("k") as first, other.lock("k", 0.0) as second, other.lock("l", 0.0) as third:
        assert (first, second, third) == (True, False, True)
        started = time.monotonic()
        with other.lock("k", 0.1) as late:
            assert not late
        assert time.monotonic() - started >= 0.1
    with other.lock("k", 0.0) as again:
        assert again


def test_without_working_locks_everyone_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    cache = CacheFolder(tmp_path)
    with cache.lock("k") as first, cache.lock("k") as second:
        assert first
        assert second
