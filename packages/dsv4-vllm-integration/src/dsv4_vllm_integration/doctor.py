# SPDX-License-Identifier: Apache-2.0
"""`dsv4-vllm doctor`: for each feature whether it would be on here, why, and what would change that.

Contract: says what a server started with this environment on this machine would be told, without starting
one: environment, versions, the signatures of the installed vLLM, and the GPUs that this process sees. What
only a running group knows (mapped memory, the topology in `vllm serve`'s arguments) is stated as a condition.
`findings` is pure; `observe` does the looking.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dsv4_vllm_integration import probe, switches
from dsv4_vllm_integration._version import __version__
from dsv4_vllm_integration.seams import gemm_ar, gemm_rs
from dsv4_vllm_integration.switches import BY_FEATURE, SWITCHES, Feature, Settings

NEEDS = {
    Feature.GEMM_RS: (
        "a server with sequence parallelism: TP 2 to 8, PP 1, --enable-expert-parallel, and DP > 1 or a "
        "MegaMoE back end; BF16, no LoRA, no ubatching, no sleep mode"
    ),
    Feature.GEMM_AR: (
        "a server without sequence parallelism (PP > 1, no --enable-expert-parallel, or DP 1 and no MegaMoE "
        "back end): TP 2 to 8, BF16, no LoRA, no ubatching, no sleep mode; on SM100 also that vLLM does not "
        "fold the all-reduce into its hyper-connections"
    ),
    Feature.MHC: "a DeepSeek-V4 or V4.1 model",
}
PACKAGES = ("vllm", "torch", "dsv4-vllm-integration", "dsv4-gemm-rs", "dsv4-symm-mem", "dsv4-mhc")
KERNEL_PACKAGES = ("nvidia-cutlass-dsl", "tilelang", "apache-tvm-ffi", "flashinfer-python")

MODULES: Mapping[Feature, tuple[str, ...]] = {
    Feature.GEMM_RS: (probe.MODEL, *gemm_rs.MODULES),
    Feature.GEMM_AR: gemm_ar.MODULES,
    Feature.MHC: (probe.MHC_TILELANG, probe.MHC_TRITON, probe.MODEL, probe.V4_MODEL),
}


@dataclass(frozen=True)
class Observation:
    """What was found here.

    Attributes:
        settings: What the environment asks for.
        versions: Of installed distributions, by name; absent ones are left out.
        obstacles: By feature, what differs in vLLM's signatures; empty texts where nothing does.
        archs: Compute capabilities of the GPUs that this process sees, as 10 * major + minor.
        fused_archs: Architectures that dsv4-gemm-rs has fused kernels for.
        workspace_bytes: Symmetric memory of a rank for the sizes that were asked about.
    """

    settings: Settings
    versions: Mapping[str, str]
    obstacles: Mapping[Feature, str]
    archs: tuple[int, ...] = ()
    fused_archs: tuple[int, ...] = ()
    workspace_bytes: int = 0


@dataclass(frozen=True)
class Finding:
    """One feature's verdict.

    Attributes:
        feature: The feature.
        verdict: "on", "off", or "depends" where the rest is decided by the server's arguments.
        reason: Why.
        remedy: What would change it; empty where nothing needs to or nothing can.
    """

    feature: str
    verdict: str
    reason: str
    remedy: str = field(default="")


def findings(seen: Observation) -> list[Finding]:
    """A verdict for each feature."""
    return [_finding(feature, seen) for feature in Feature]


def _finding(feature: Feature, seen: Observation) -> Finding:
    name = BY_FEATURE[feature].name
    obstacle = probe.version_obstacle(seen.versions.get("vllm"))
    if obstacle:
        return Finding(feature.value, "off", obstacle, f"install vLLM {probe.VERSIONS[-1]}.x beside this")
    if seen.obstacles.get(feature):
        text = "this build of vLLM differs from the one that the plugin knows; use a release"
        return Finding(feature.value, "off", seen.obstacles[feature], text)
    if not seen.archs:
        return Finding(feature.value, "off", "this process sees no GPU", "run it where the server runs")
    projects = feature is not Feature.MHC
    if projects:
        without = sorted(set(seen.archs) - set(seen.fused_archs))
        if without:
            listed = ", ".join(f"sm_{arch}" for arch in without)
            known = ", ".join(f"sm_{arch}" for arch in seen.fused_archs)
            return Finding(feature.value, "off", f"no fused kernel for {listed}, only for {known}")
    elif "tilelang" not in seen.versions:
        return Finding(feature.value, "off", "TileLang is not installed", "pip install tilelang")
    if feature not in seen.settings.features:
        return Finding(feature.value, "off", f"{name} is not 1", f"export {name}=1")
    extra = ""
    if projects:
        extra = (
            f"; from {seen.settings.min_tokens} tokens a batch on; "
            f"{seen.workspace_bytes / 2**20:.0f} MiB of symmetric memory a rank"
        )
    return Finding(feature.value, "depends", f"everything here is as it should be{extra}", NEEDS[feature])


def observe(tensor_parallel: int, max_tokens: int, hidden: int) -> Observation:
    """Look at this process's environment, installation and GPUs."""
    versions = {}
    for name in (*PACKAGES, *KERNEL_PACKAGES):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    from dsv4_gemm_rs.workspace import FUSED_ARCHS, exchange_layout

    nbytes = exchange_layout(tensor_parallel, max_tokens, hidden).total_bytes
    obstacles = {feature: _signature_obstacle(feature, versions.get("vllm")) for feature in Feature}
    return Observation(switches.read(), versions, obstacles, _archs(), tuple(sorted(FUSED_ARCHS)), nbytes)


def _archs() -> tuple[int, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    found = (torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    return tuple(10 * major + minor for major, minor in found)


def _signature_obstacle(feature: Feature, version: str | None) -> str:
    if probe.version_obstacle(version):
        return ""
    for name in MODULES[feature]:
        try:
            found = probe.signature_obstacle(importlib.import_module(name))
        except Exception as error:
            found = f"{name} cannot be imported: {type(error).__name__}: {error}"
        if found:
            return found
    return ""


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser("doctor", help="say for each feature whether it would be on here, and why")
    parser.add_argument("--tensor-parallel-size", type=int, default=4, help="ranks of the server (default 4)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=8192, help="as given to vllm serve (default 8192)"
    )
    parser.add_argument("--hidden-size", type=int, default=5120, help="of the model (default 5120)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report; returns 0."""
    seen = observe(options.tensor_parallel_size, options.max_num_batched_tokens, options.hidden_size)
    verdicts = findings(seen)
    if options.json:
        shown = {
            "version": __version__,
            "versions": dict(seen.versions),
            "archs": list(seen.archs),
            "features": [asdict(verdict) for verdict in verdicts],
            "complaints": list(seen.settings.complaints),
        }
        print(json.dumps(shown, indent=1))
        return 0
    print(f"dsv4-vllm-integration {__version__}")
    print("versions: " + ", ".join(f"{name} {version}" for name, version in seen.versions.items()))
    print("GPUs: " + (", ".join(f"sm_{arch}" for arch in seen.archs) or "none"))
    for complaint in seen.settings.complaints:
        print(f"environment: {complaint}")
    for verdict in verdicts:
        print(f"{verdict.feature}: {verdict.verdict}: {verdict.reason}")
        if verdict.remedy:
            print(f"  needs: {verdict.remedy}")
    print("switches:")
    for switch in SWITCHES:
        print(f"  {switch.name} (default {switch.default}): {switch.meaning}")
    return 0
