# SPDX-License-Identifier: Apache-2.0
"""The pytest fixture `emulator`: makes systems of emulated devices for a test, and looks after them.

    def test_exchange(emulator):
        system = emulator(ranks=2)
        ...
        system.run()

Contract: `emulator(...)` takes what `System` takes. The seed comes from `--emulator-seed` unless the test
gives one, and stands in a failed test's report. With `--emulator-traces FOLDER` each system's schedule is
written there, with `--emulator-memory-model RANKS` the memory model's checker watches every system of so many
ranks or fewer that has the standard ones. A test that ends with launches it never ran has a mistake, and is
told.

Where there is no NVIDIA driver, the stand-in for the DSL's run-time library is loaded at the start, before
any test can make the DSL load its own; otherwise whether a test can emulate would depend on those before it.

pytest itself is imported only once it runs this plugin, as the package does not depend on it; so the fixture
is made in `pytest_configure`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from dsv4_ptx_emulator.runtime.system import System

DRIVER = Path("/proc/driver/nvidia/version")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("dsv4-ptx-emulator")
    group.addoption("--emulator-seed", type=int, default=0, help="seed of the emulator's schedules")
    group.addoption(
        "--emulator-traces", type=Path, default=None, help="folder for schedules as Chrome traces"
    )
    group.addoption(
        "--emulator-memory-model",
        type=int,
        default=0,
        metavar="RANKS",
        help="check the order of memory in systems of so many ranks or fewer (eight take 23 GB)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the fixture; have the stand-in come first."""
    import pytest

    _stand_in_comes_first()

    class Fixtures:
        """Holds the fixture."""

        @pytest.fixture
        def emulator(self, request: pytest.FixtureRequest) -> Iterator[Callable[..., System]]:
            """Makes a `System`; see `dsv4_ptx_emulator.pytest_plugin`."""
            yield from _systems(request)

    config.pluginmanager.register(Fixtures(), "dsv4-ptx-emulator-fixtures")


def _stand_in_comes_first() -> None:
    if DRIVER.exists() or find_spec("cutlass") is None:
        return
    from dsv4_ptx_emulator.runtime.dsl import load_first
    from dsv4_ptx_emulator.runtime.errors import CompilerError
    from dsv4_ptx_emulator.runtime.library import stand_in_library

    # Without a compiler nothing can emulate; the tests that would say so themselves.
    with suppress(CompilerError):
        load_first(stand_in_library())


def _systems(request: pytest.FixtureRequest) -> Iterator[Callable[..., System]]:
    # Not before a test asks for it: NumPy would be imported by every pytest of the environment.
    from dsv4_ptx_emulator.emulator import MEMORY_MODEL
    from dsv4_ptx_emulator.runtime.system import System

    made: list[System] = []
    judged: int = request.config.getoption("--emulator-memory-model")
    traces: Path | None = request.config.getoption("--emulator-traces")

    def make(ranks: int = 1, **options: Any) -> System:
        options.setdefault("seed", request.config.getoption("--emulator-seed"))
        options.setdefault("trace", traces is not None)
        if ranks <= judged and options.get("checks", True) is True:
            options["checks"] = MEMORY_MODEL
        system = System(ranks, **options)
        made.append(system)
        text = f"{ranks} rank(s), {system.arch}, seed {options['seed']}"
        request.node.add_report_section("setup", "emulator", text)
        return system

    yield make
    for number, system in enumerate(made):
        if traces is not None:
            traces.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^\w.-]+", "_", request.node.nodeid)
            system.write_trace(traces / f"{name}-{number}.json")
        if system.failure is None and system.pending:
            raise RuntimeError(f"the test never ran {system.pending} launch(es): System.run, or synchronise")
