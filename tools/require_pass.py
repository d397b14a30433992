# SPDX-License-Identifier: Apache-2.0
"""Pytest plug-in (`-p tools.require_pass`): a run in which no test passed has failed.

For runs whose point is the hardware they run on. Pytest counts a run of nothing but skipped tests as a
success, so a machine with a broken driver would be green.
"""

from __future__ import annotations

import pytest

_passed = pytest.StashKey[int]()


class _Counter:
    def __init__(self, config: pytest.Config) -> None:
        self._stash = config.stash
        self._stash[_passed] = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._stash[_passed] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and not self._stash[_passed]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._stash[_passed]:
            terminalreporter.write_line("no test passed here, which counts as a failure", red=True)


def pytest_configure(config: pytest.Config) -> None:
    """Count the tests that pass."""
    config.pluginmanager.register(_Counter(config), "require-pass")
