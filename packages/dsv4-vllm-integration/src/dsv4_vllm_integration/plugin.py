# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM calls once in each of its processes.

Contract: never raises (vLLM would end the process), never touches CUDA (it runs before forks and in the
subprocess that inspects models), may run any number of times, and costs next to nothing: it reads four
environment variables, and where a feature is asked for it leaves a note for the import system. Decisions are
made where the model is built, by all ranks together. While no switch is set nothing is changed at all.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
from collections.abc import Sequence

from dsv4_vllm_integration import switches
from dsv4_vllm_integration.probe import version_obstacle, vllm_version
from dsv4_vllm_integration.states import Status, announce, logger
from dsv4_vllm_integration.switches import BY_FEATURE, Feature, Settings

_armed: set[Feature] = set()


def register() -> None:
    """Arm the features that the environment asks for."""
    try:
        _register(switches.read())
    except Exception:
        logger.exception("dsv4: the plugin failed to start; vLLM goes on unchanged")


def _register(settings: Settings) -> None:
    # One process of a server speaks: its children are started with the same environment.
    speak = multiprocessing.parent_process() is None
    if speak:
        for complaint in settings.complaints:
            logger.warning("dsv4: %s", complaint)
    _make_known([switch.name for switch in switches.SWITCHES if switch.name in os.environ])
    wanted = [feature for feature in Feature if feature in settings.features and feature not in _armed]
    if not wanted:
        return
    version = vllm_version()
    obstacle = version_obstacle(version)
    for feature in wanted:
        _armed.add(feature)
        try:
            reason = obstacle
            if not reason:
                _arm(feature, settings)
        except Exception as error:
            logger.exception("dsv4: %s cannot be armed", feature.value)
            reason = f"{type(error).__name__}: {error}"
        if reason:
            announce(feature, Status.OFF, reason, speak=speak)
        else:
            text = f"{BY_FEATURE[feature].name}=1, vLLM {version}; decided when the model is built"
            announce(feature, Status.ARMED, text, speak=speak)


def _make_known(names: Sequence[str]) -> None:
    """Tell vLLM the names of our variables that are set, on or off.

    It warns of environment variables of its prefix that it doesn't know, and ends with
    `--fail-on-environ-validation`. Known ones also enter the key of its compile cache, as they should.
    """
    if not names:
        return
    try:
        known = importlib.import_module("vllm.envs").environment_variables
        for name in names:
            known.setdefault(name, functools.partial(os.environ.get, name))
    except Exception as error:
        logger.debug("dsv4: vLLM's table of environment variables is not as expected: %s", error)


def _arm(feature: Feature, settings: Settings) -> None:
    """Prepare one feature."""
    if feature is Feature.GEMM_RS:
        from dsv4_vllm_integration.seams import gemm_rs

        gemm_rs.arm(settings)
    elif feature is Feature.GEMM_AR:
        from dsv4_vllm_integration.seams import gemm_ar

        gemm_ar.arm(settings)
    else:
        from dsv4_vllm_integration.seams import mhc

        mhc.arm()


def forget() -> None:
    """Let `register` start afresh."""
    _armed.clear()
