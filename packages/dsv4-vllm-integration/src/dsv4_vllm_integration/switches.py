# SPDX-License-Identifier: Apache-2.0
"""The environment variables of the plugin: one table, read in one place.

Contract: while none of the features' variables is set, the plugin touches nothing. A value that means
neither on nor off counts as off and is reported; it never ends a server.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

ON = frozenset({"1", "true", "on", "yes"})
OFF = frozenset({"", "0", "false", "off", "no"})


class Feature(enum.StrEnum):
    """What the plugin can replace."""

    GEMM_RS = "gemm_rs"
    """`wo_b` and the reduce-scatter of sequence parallelism in one kernel."""
    GEMM_AR = "gemm_ar"
    """`wo_b` and the all-reduce of plain tensor parallelism: the same kernel, then a gather."""
    MHC = "mhc"
    """Hyper-connections: one launch between two sublayers."""


@dataclass(frozen=True)
class Switch:
    """One environment variable.

    Attributes:
        name: The variable.
        default: What unset means, as a value.
        meaning: For people.
        feature: The feature that it turns on; None for a parameter.
    """

    name: str
    default: str
    meaning: str
    feature: Feature | None = None


GEMM_RS = Switch(
    "VLLM_DSV41_GEMM_RS",
    "0",
    "1: DeepSeek-V4.1's `wo_b` under sequence parallelism as one GEMM + reduce-scatter",
    Feature.GEMM_RS,
)
GEMM_AR = Switch(
    "VLLM_DSV41_GEMM_AR",
    "0",
    "1: DeepSeek-V4.1's `wo_b` without sequence parallelism as GEMM + reduce-scatter, then a gather",
    Feature.GEMM_AR,
)
MHC = Switch(
    "VLLM_DSV41_MHC",
    "0",
    "1: hyper-connections of DeepSeek-V4 and V4.1 by dsv4-mhc where vLLM would take its TileLang kernels",
    Feature.MHC,
)
MIN_TOKENS = Switch(
    "VLLM_DSV41_GEMM_RS_MIN_TOKENS",
    "128",
    "batches of fewer tokens stay on vLLM's own GEMM and collective",
)
SWITCHES = (GEMM_RS, GEMM_AR, MHC, MIN_TOKENS)
BY_FEATURE = {switch.feature: switch for switch in SWITCHES if switch.feature is not None}


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        features: Features that are switched on.
        min_tokens: Smallest batch that takes the fused kernel, at least 1.
        complaints: Values that were not understood, one sentence each.
    """

    features: frozenset[Feature] = frozenset()
    min_tokens: int = int(MIN_TOKENS.default)
    complaints: tuple[str, ...] = field(default=())


def read(environment: Mapping[str, str] | None = None) -> Settings:
    """The settings of `environment`, by default this process's."""
    values = os.environ if environment is None else environment
    features = set()
    complaints = []
    for feature, switch in BY_FEATURE.items():
        value = values.get(switch.name, switch.default).strip().lower()
        if value in ON:
            features.add(feature)
        elif value not in OFF:
            complaints.append(f"{switch.name}={value!r} is neither 0 nor 1 and counts as 0")
    text = values.get(MIN_TOKENS.name, "").strip() or MIN_TOKENS.default
    if text.isdecimal() and int(text) >= 1:
        min_tokens = int(text)
    else:
        min_tokens = int(MIN_TOKENS.default)
        complaints.append(f"{MIN_TOKENS.name}={text!r} is no number of tokens; {min_tokens} is taken")
    return Settings(frozenset(features), min_tokens, tuple(complaints))
