# SPDX-License-Identifier: Apache-2.0
"""`doctor`: what this machine and group offer, which path calls take here, which kernels wait compiled."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dsv4_symm_mem.backends import VirtualGroup
from dsv4_symm_mem.compiled import gpu_arch
from dsv4_symm_mem.probe import SWITCHES, GroupProbe, probe
from dsv4_symm_mem.protocol.layout import Strategy

from dsv4_gemm_rs._version import __version__
from dsv4_gemm_rs.cli.cached import CacheState
from dsv4_gemm_rs.cli.groups import add_group_options, command_group
from dsv4_gemm_rs.dispatch import Problem
from dsv4_gemm_rs.problems import WO_B_K, WO_B_N, default_k
from dsv4_gemm_rs.tuning.file import find
from dsv4_gemm_rs.weights import WeightKind
from dsv4_gemm_rs.workspace import FUSED_ARCHS, Workspace

_TOKENS = (16, 128, 1024, 8192)


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "doctor", help="describe the machine, say which path is taken and why, and what is compiled already"
    )
    add_group_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report; returns 0."""
    with command_group(options) as group:
        if isinstance(group, VirtualGroup):
            described = group.run(probe)[0]
            decisions, multicast = group.run(_decisions)[0]
        else:
            described = probe(group)
            decisions, multicast = _decisions(group)
    if described.rank != 0:
        return 0
    archs = sorted({device.arch for device in described.devices if device.arch}) or sorted(FUSED_ARCHS)
    arch = described.devices[0].arch
    thresholds = "no GPU" if arch is None else str(find(arch))
    cache = CacheState.of([gpu_arch(divmod(arch, 10)) for arch in archs])
    if options.json:
        shown = {**described.as_dict(), "decisions": decisions, "multicast_obstacle": multicast}
        shown["cache"] = cache.as_dict()
        shown["own_thresholds"] = thresholds
        print(json.dumps({"version": __version__, **shown}, indent=1))
    else:
        _print(described, decisions, multicast)
        print(f"own thresholds: {thresholds}")
        print(cache)
    return 0


def _decisions(group: Any) -> tuple[list[dict[str, Any]], str]:
    """What calls take, and what keeps fused kernels of the group from reading sums through multicast."""
    found = []
    with Workspace.create(group, max_tokens=max(_TOKENS), n=WO_B_N) as workspace:
        for kind in WeightKind:
            for m in _TOKENS:
                problem = Problem(m, WO_B_N, default_k(workspace.world_size), kind)
                found.append({"kind": kind.value, "m": m, "decision": str(workspace.decide(problem))})
        obstacle = workspace.obstacle(Strategy.MULTICAST)
    return found, obstacle


def _print(described: GroupProbe, decisions: list[dict[str, Any]], obstacle: str) -> None:
    print(
        f"dsv4-gemm-rs {__version__}, {len(described.devices)} ranks, symmetric memory: {described.backend}"
    )
    shown: dict[str, list[int]] = {}
    for rank, device in enumerate(described.devices):
        multicast = "yes" if device.multicast else f"no, {device.multicast_reason}"
        arch = f"sm_{device.arch}" if device.arch else "no GPU"
        text = (
            f"  device {device.device}: {device.name} ({arch}), driver {device.driver}, CUDA {device.cuda}\n"
            f"  multicast: {multicast}\n"
            f"  versions: {', '.join(f'{name} {version}' for name, version in device.versions.items())}\n"
            "  switches: "
            + ("; ".join(f"{k}={v} ({SWITCHES[k]})" for k, v in device.switches.items()) or "none set")
        )
        shown.setdefault(text, []).append(rank)
    for text, ranks in shown.items():
        print(f"rank {', '.join(map(str, ranks))}:\n{text}")
    print("links (row reaches column):")
    for rank, row in enumerate(described.links):
        print(f"  {rank}: " + " | ".join(row))
    print(f"exchange through multicast: {f'no, {obstacle}' if obstacle else 'yes, where it is asked for'}")
    print(f"decisions for N={WO_B_N}, K={WO_B_K} over {len(described.devices)} ranks:")
    last = ""
    for entry in decisions:
        text = entry["decision"]
        print(f"  {entry['kind']:>5} M={entry['m']:<5} " + ("as above" if text == last else text))
        last = text
