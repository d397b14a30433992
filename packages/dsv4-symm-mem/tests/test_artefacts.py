# SPDX-License-Identifier: Apache-2.0
"""Real kernels through the cache: cold and warm, many processes, a killed compiler, damage, and no cache.

What is loaded from the cache is run in the emulator, where one is installed; on a GPU test_artefacts_gpu.py
does the same.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from artefact_worker import build_small
from dsv4_symm_mem.artefacts import host, store
from dsv4_symm_mem.artefacts.container import Artefact
from dsv4_symm_mem.artefacts.folder import CacheFolder
from dsv4_symm_mem.artefacts.store import Origin, Recipe, is_there, obtain
from dsv4_symm_mem.collectives.cuda import reduce_scatter_kernel
from dsv4_symm_mem.compiled import Kernel, Tally, gpu_arch, prepare

library: Any = None
with suppress(ImportError):
    from dsv4_ptx_emulator.runtime import library

WORKER = Path(__file__).parent / "support" / "artefact_worker.py"
ARCH = "sm_90a"


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every line is said again; what is loaded is linked against the emulator's library, if there is one.

    The DSL's loader opens the library that it links against for the whole process, and the first one to
    define a symbol wins: the real one would take the place of the emulator's in later tests.
    """
    monkeypatch.setattr(store, "_said", set())
    with ExitStack() as stack:
        if library is not None and not library.obstacle():
            from dsv4_ptx_emulator.runtime.host import host_table

            stack.enter_context(host_table().compiling(ARCH))
        yield


def small(builds: list[str], name: str = "small") -> Recipe:
    def build(options: str) -> Any:
        builds.append(options)
        return build_small(options)

    return Recipe(name, build, ["dsv4_symm_mem"])


def get(recipe: Recipe, folder: Path, arch: str = ARCH) -> store.Obtained:
    obtained = obtain(recipe, arch, folder=folder)
    assert obtained is not None
    return obtained


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_compiled_once_then_loaded(arch: str, tmp_path: Path) -> None:
    builds: list[str] = []
    recipe = small(builds)
    assert not is_there(recipe, arch, tmp_path)
    assert get(recipe, tmp_path, arch).origin is Origin.COMPILED
    again = get(recipe, tmp_path, arch)
    assert again.origin is Origin.LOADED
    assert callable(again.function)
    assert len(builds) == 1
    assert is_there(recipe, arch, tmp_path)
    artefact = CacheFolder(tmp_path).read(recipe.key(arch).file_name)
    assert f".target {arch}" in artefact.ptx
    assert artefact.cubin.startswith(b"\x7fELF")
    assert artefact.facts["arch"] == arch
    # Another architecture, another kernel: each its own.
    assert not is_there(recipe, "sm_120a", tmp_path)
    assert not is_there(small(builds, "other"), arch, tmp_path)


def test_the_object_asks_for_no_newer_cpu_than_it_says(tmp_path: Path) -> None:
    """The DSL alone would compile host functions for this machine's CPU."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump is not installed")
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip("knows x86-64 registers only")
    recipe = reduce_scatter_kernel(torch.float32).recipe
    get(recipe, tmp_path)
    path = tmp_path / recipe.key(ARCH).file_name
    command = [objdump, "-D", "-j", ".ltext", "-j", ".text", str(path)]
    listing = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "ret" in listing.stdout, listing.stderr
    assert not re.search(r"%[yz]mm|\sv[a-z]+ps\s", listing.stdout)


def start(folder: Path, count: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), str(folder), ARCH, str(count), str(seconds)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def compilations(tmp_path: Path) -> list[str]:
    log = tmp_path / "compilations"
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def test_eight_processes_compile_once(tmp_path: Path) -> None:
    process = start(tmp_path / "cache", 8, 0.5)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    answers = [json.loads(line) for line in output.splitlines()]
    assert sorted(answer["origin"] for answer in answers) == ["compiled"] + ["loaded"] * 7
    assert all(answer["function"] for answer in answers)
    assert len(compilations(tmp_path)) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_compiler_does_not_keep_others(
    how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A killed one gives its lock back at once; a stopped one is waited for, but not for ever."""
    folder = tmp_path / "cache"
    process = start(folder, 1, 600.0)
    try:
        deadline = time.monotonic() + 60
        while not compilations(tmp_path):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        assert obtain(small([]), ARCH, folder=folder, wait_seconds=0.0) is None
        os.killpg(process.pid, how)
        started = time.monotonic()
        builds: list[str] = []
        obtained = obtain(small(builds), ARCH, folder=folder, wait_seconds=1.0)
        assert obtained is not None
        assert obtained.origin is Origin.COMPILED
        assert len(builds) == 1
        said = "another process has been compiling" in caplog.text
        assert said == (how is signal.SIGSTOP)
        assert time.monotonic() - started < 60
        assert get(small(builds), folder).origin is Origin.LOADED
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[:-9])
    elif how == "flipped":
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "writable":
        path.chmod(0o666)
    else:  # a whole artefact of another kernel under this one's name
        other = small([], "other")
        get(other, path.parent)
        (path.parent / other.key(ARCH).file_name).replace(path)


@pytest.mark.parametrize("how", ["truncated", "flipped", "empty", "writable", "foreign"])
def test_what_cannot_be_trusted_is_compiled_again(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    builds: list[str] = []
    recipe = small(builds)
    get(recipe, tmp_path)
    damage(tmp_path / recipe.key(ARCH).file_name, how)
    assert not is_there(recipe, ARCH, tmp_path) or how == "foreign"
    assert get(recipe, tmp_path).origin is Origin.COMPILED
    assert [record.message.startswith("not loading") for record in caplog.records] == [True]
    assert len(builds) == 2
    assert get(recipe, tmp_path).origin is Origin.LOADED
    assert len(builds) == 2


def test_an_object_that_does_not_link_is_compiled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    builds: list[str] = []
    recipe = small(builds)
    get(recipe, tmp_path)
    cache, name = CacheFolder(tmp_path), recipe.key(ARCH).file_name
    artefact = cache.read(name)
    spoilt = artefact.object.replace(b"__tvm_ffi_kernel", b"__tvm_ffi_kernfl")
    cache.write(name, Artefact(spoilt, artefact.ptx, artefact.facts))
    assert get(recipe, tmp_path).origin is Origin.COMPILED
    assert "not loading" in caplog.text
    assert get(recipe, tmp_path).origin is Origin.LOADED


def test_a_folder_that_cannot_be_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    builds: list[str] = []
    get(small(builds), tmp_path)
    before = sorted(tmp_path.iterdir())
    # Permissions do not bind root, whom tests may run as.
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    assert get(small(builds), tmp_path).origin is Origin.LOADED
    assert caplog.records == []
    for name in ("one", "two"):
        obtained = get(Recipe(name, lambda options: options, ["dsv4_symm_mem"]), tmp_path)
        assert obtained.origin is Origin.COMPILED
        assert obtained.function == f"--enable-tvm-ffi --gpu-arch {ARCH}"
    assert [record.message for record in caplog.records] == [
        f"compiled kernels are not kept: {tmp_path} cannot be written"
    ]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("value", ["/proc/no/such/folder", "off"])
def test_without_a_cache_kernels_are_compiled(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DSV4_CACHE_DIR", value)
    for name in ("one", "two"):
        obtained = obtain(Recipe(name, lambda options: options, ["dsv4_symm_mem"]), ARCH)
        assert obtained is not None
        assert obtained.function == f"--enable-tvm-ffi --gpu-arch {ARCH}"
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith("compiled kernels are not kept: ")


def test_a_function_that_cannot_be_kept_is_still_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    obtained = get(Recipe("odd", lambda options: "a function", ["dsv4_symm_mem"]), tmp_path)
    assert obtained.function == "a function"
    assert [record.message.split(":")[0] for record in caplog.records] == ["odd is compiled, but not kept"]
    assert not list(tmp_path.glob("*.o"))


def test_what_the_compiler_raises_is_raised_and_the_lock_given_back(tmp_path: Path) -> None:
    def fail(options: str) -> Any:
        raise RuntimeError("no such instruction")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such instruction"):
            obtain(Recipe("failing", fail, ["dsv4_symm_mem"]), ARCH, folder=tmp_path, wait_seconds=0.0)


def test_kernels_are_made_ready_together(tmp_path: Path) -> None:
    built: list[str] = []

    def kernel(name: str) -> Kernel:
        return Kernel(small(built, name))

    first = [kernel(name) for name in ("a", "b", "c")]
    told: list[str] = []

    def tell(done: Kernel, obtained: store.Obtained) -> None:
        told.append(f"{done.recipe.name} {obtained.origin}")

    tally = prepare(first[:2], ARCH, folder=tmp_path, progress=tell)
    assert told == ["a compiled", "b compiled"]
    assert (tally.counts["compiled"], tally.counts["loaded"]) == (2, 0)
    assert prepare(first[:2], ARCH, folder=tmp_path).counts == Tally().counts
    # Another process is at the first one: the others come before it.
    again = [kernel(name) for name in ("c", "a", "b")]
    told.clear()
    cache = CacheFolder(tmp_path)

    def progress(done: Kernel, obtained: store.Obtained) -> None:
        tell(done, obtained)
        if done is again[2]:
            held.__exit__(None, None, None)

    held = cache.lock(again[0].recipe.key(ARCH).name, 0.0)
    assert held.__enter__()
    tally = prepare(again, ARCH, folder=tmp_path, progress=progress)
    assert told == ["a loaded", "b loaded", "c compiled"]
    assert tally.as_dict() == {"loaded": 2, "compiled": 1, "seconds": tally.seconds}
    assert str(tally).startswith("2 loaded, 1 compiled in ")


def test_architectures_are_named_as_compilers_do() -> None:
    archs = [gpu_arch(capability) for capability in ((8, 9), (9, 0), (10, 0), (10, 3))]
    assert archs == ["sm_89", "sm_90a", "sm_100a", "sm_103a"]


def loaded_in(emulation: Any, recipe: Recipe, folder: Path) -> Any:
    """A cached kernel loaded for the emulator, whose run-time library finds the PTX that the cache kept."""
    name = recipe.key(ARCH).file_name
    artefact = CacheFolder(folder).read(name)
    emulation.table.store.add(artefact.cubin, artefact.ptx)
    with emulation.compiling():
        return host.load(folder / name)


def test_a_loaded_kernel_runs(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if library is None:
        pytest.skip("dsv4-ptx-emulator is not installed")
    if obstacle := library.obstacle():
        pytest.skip(obstacle)
    # Compiled elsewhere, so that nobody but the cache knows its PTX.
    process = start(tmp_path / "cache", 1, 0.0)
    assert process.communicate(timeout=120)[1] == ""
    recipe = small([])
    system = request.getfixturevalue("emulator")(1)
    function = loaded_in(system, recipe, tmp_path / "cache")
    x = torch.zeros(1, dtype=torch.int32)
    for value in (7, 11):
        system.devices[0].stream().launch(function, (x.data_ptr(), value), memory=(x,))
        system.run()
        assert x.item() == value
