# SPDX-License-Identifier: Apache-2.0
"""Servers: starting one with an arm's variables, waiting for it, asking it for preemptions, ending it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dsv4_symm_mem import UnsupportedError

PREEMPTIONS = re.compile(r"^vllm:num_preemptions(?:_total)?(?:\{[^}]*\})?\s+([0-9.eE+]+)", re.MULTILINE)
STOP_SECONDS = 60.0


def get(url: str, seconds: float = 10.0) -> str | None:
    """The text at `url`, or None if there is no good answer."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            text: str = answer.read().decode("utf-8", "replace")
            return text
    except (OSError, urllib.error.URLError, ValueError):
        return None


def preemptions(url: str) -> int | None:
    """How often the server at `url` has preempted a request since it started; None if it does not say."""
    found = PREEMPTIONS.findall(get(f"{url}/metrics") or "")
    return round(sum(map(float, found))) if found else None


@contextmanager
def server(
    command: tuple[str, ...], environment: Mapping[str, str], url: str, log: Path, seconds: float
) -> Iterator[None]:
    """A server that answers at `url` for the length of the context; its output goes to `log`.

    Raises:
        UnsupportedError: Something else answers there already, or it ended or did not answer in time; names
            the log.
    """
    if get(f"{url}/health", 2.0) is not None:
        raise UnsupportedError(f"a server answers at {url} already")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # A group of its own, so that its workers end with it.
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(process, url, log, seconds)
            yield
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while get(f"{url}/health", 2.0) is None:
        if process.poll() is not None:
            raise UnsupportedError(f"the server ended with code {process.returncode}; see {log}")
        if time.monotonic() > end:
            raise UnsupportedError(f"no answer from {url} within {seconds:g} s; see {log}")
        time.sleep(0.5)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for step in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, step)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_SECONDS)
            break
        except subprocess.TimeoutExpired:
            continue
    process.poll()
