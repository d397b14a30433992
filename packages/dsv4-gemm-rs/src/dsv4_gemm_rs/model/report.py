# SPDX-License-Identifier: Apache-2.0
"""The model against what is known, what it predicts, and how far each input moves that.

Contract: rows of plain numbers, all of measure "model"; their `table` says which of four they belong to:
`inputs`, `comparison` (modelled beside published or measured), `prediction`, `sensitivity`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dsv4_gemm_rs.bench.report import Check, Report, exchange_of
from dsv4_gemm_rs.dispatch.costs import choose
from dsv4_gemm_rs.dispatch.decide import BLOCK_SCALED_ARCHS
from dsv4_gemm_rs.kernels.families import Operand, Strategy, members
from dsv4_gemm_rs.kernels.sm100.config import KernelConfig
from dsv4_gemm_rs.model import calls
from dsv4_gemm_rs.model.calls import Call
from dsv4_gemm_rs.model.inputs import B200, H200, SOURCES
from dsv4_gemm_rs.problems import WO_B_N, default_k
from dsv4_gemm_rs.weights import WeightKind

SM90, SM100 = members(90, Operand.BF16), members(100, Operand.MXFP8)
SM100_MULTICAST = members(100, Operand.MXFP8, Strategy.MULTICAST)
PULLED_TILE = KernelConfig(Operand.MXFP8, 128, 2)
"""256 x 128 by pairs, what vLLM 0.33's kernel of that kind takes for M >= 1024."""
PUBLISHED = {2048: (100.08, 60.91), 4096: (139.81, 94.21), 8192: (225.74, 160.78)}
"""Microseconds on four B200s by M, unfused and fused through multicast, N = 5120 and K = 2048 a rank (N is
inferred from the figures). The fused kernel reads sums through multicast."""
PUBLISHED_GEMM = {2048: 18.6, 4096: 31.1, 8192: 59.4}
"""Microseconds of FlashInfer's MXFP8 product on a B200, N = 6144 and K = 1536 (derived): vLLM #46393; the
middle where a range was published."""
WITHIN = 0.1
"""Share by which a modelled time may miss a known one."""
VARIED = 0.25
"""Share by which inputs are varied."""
OWN = frozenset({"gemm-ours", "fused", "dispatched"})
"""Cases of a benchmark that depend on how fused kernels exchange."""
TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)


def inputs() -> Iterator[dict[str, Any]]:
    """Every input of the B200 beside the H200's, with its source."""
    for name, source in SOURCES.items():
        yield {
            "measure": "model",
            "table": "inputs",
            "input": name,
            "b200": B200.value(name),
            "h200": H200.value(name),
            "source": source,
        }


def comparison(measured: Sequence[Report]) -> Iterator[dict[str, Any]]:
    """Modelled beside published and, where there is a benchmark's result of a known GPU, measured times."""
    for m, (unfused, fused) in PUBLISHED.items():
        call = Call(m, 5120, 2048, 4)
        yield _compared("4 x B200", "unfused, published", call, calls.unfused_us(B200, SM100, call), unfused)
        modelled = calls.pulled_us(B200, PULLED_TILE, call)
        yield _compared("4 x B200", "fused through multicast, published", call, modelled, fused)
    for m, product in PUBLISHED_GEMM.items():
        call = Call(m, 6144, 1536, 1)
        yield _compared("B200", "product alone, published", call, calls.gemm_us(B200, SM100, call), product)
    for report in measured:
        yield from _measured(report)


def _measured(report: Report) -> Iterator[dict[str, Any]]:
    device, ranks = str(report.machine["device"]), int(report.machine["ranks"])
    if report.machine["ranks_are"] != "processes":
        return
    where = f"{ranks} x {device.removeprefix('NVIDIA ')}"
    pulled = exchange_of(report) == Strategy.MULTICAST.value
    gpu, family = (H200, SM90) if report.machine["arch"] == 90 else (B200, SM100)
    if pulled:
        family = SM100_MULTICAST
    model: dict[str, Callable[[Call], float]] = {
        "quantise": lambda call: calls.quantise_us(gpu, call),
        "gemm-ours": lambda call: calls.alone_us(gpu, family, call),
        "nccl-reduce-scatter": lambda call: calls.collective_us(gpu, call),
        "unfused-call-nccl": lambda call: calls.unfused_us(gpu, family, call),
        "fused": lambda call: calls.fused_us(gpu, family, call),
        "dispatched": lambda call: calls.ours_us(gpu, family, call),
    }
    for case, modelled in model.items():
        if pulled and case not in OWN:
            continue
        what = f"{case}{' through multicast' * pulled}, measured"
        for row in report.rows:
            # Below that the dispatcher takes another path.
            if row["case"] == case and row["m"] >= TOKENS[0] and _is_modelled(row):
                call = Call(row["m"], row["n"], row["k"], ranks)
                yield _compared(where, what, call, modelled(call), row["median_us"])


def _is_modelled(row: Mapping[str, Any]) -> bool:
    """Whether a benchmark's row is of an MXFP8 call; there is no model of those in BF16."""
    return bool(row.get("kind", WeightKind.MXFP8.value) == WeightKind.MXFP8.value)


def _compared(machine: str, what: str, call: Call, modelled: float, known: float) -> dict[str, Any]:
    row: dict[str, Any] = {"measure": "model", "table": "comparison", "machine": machine, "what": what}
    row |= {"m": call.m, "n": call.n, "k": call.k}
    return row | {"modelled_us": modelled, "known_us": known, "ratio": modelled / known}


def prediction(
    measured: Sequence[Report] = (), world_sizes: Sequence[int] = (2, 4, 8)
) -> Iterator[dict[str, Any]]:
    """Our calls on B200s by number of ranks and M, with their parts and the alternatives, all modelled.

    What a benchmark of B200s has of the same calls stands beside it, None where there is none.
    """
    known = {
        (exchange_of(report), int(report.machine["ranks"]), row["m"], row["n"], row["k"]): row["median_us"]
        for report in measured
        if report.machine["arch"] in BLOCK_SCALED_ARCHS and report.machine["ranks_are"] == "processes"
        for row in report.rows
        if row["case"] == "dispatched" and _is_modelled(row)
    }
    for world_size in world_sizes:
        for m in TOKENS:
            call = Call(m, WO_B_N, default_k(world_size), world_size)
            shape = (m, call.n, call.k, world_size, B200.multiprocessors)
            config = choose(B200.rates, SM100, *shape)
            yield {
                "measure": "model",
                "table": "prediction",
                "world_size": world_size,
                "m": m,
                "k": call.k,
                "tile": f"{config.tile_m * config.cluster}x{config.tile_n}",
                "quantise_us": calls.quantise_us(B200, call),
                "gemm_us": calls.gemm_us(B200, SM100, call),
                "wire_us": call.wire_bytes / B200.rates.link_bytes_per_us,
                "ours_us": calls.ours_us(B200, SM100, call),
                "multicast_us": calls.ours_us(B200, SM100_MULTICAST, call),
                "pulled_us": calls.pulled_us(B200, PULLED_TILE, call),
                "unfused_us": calls.unfused_us(B200, SM100, call),
                **{
                    f"measured_{exchange}_us": known.get((exchange, world_size, m, call.n, call.k))
                    for exchange in Strategy
                },
            }


def sensitivity(world_size: int = 4, tokens: Sequence[int] = (256, 2048, 8192)) -> Iterator[dict[str, Any]]:
    """By how many microseconds our call moves with each input a quarter up and a quarter down.

    For either exchange; inputs that move nothing are left out.
    """
    for exchange, family in ((Strategy.PUSH, SM100), (Strategy.MULTICAST, SM100_MULTICAST)):
        for name in SOURCES:
            moved = {}
            for m in tokens:
                call = Call(m, WO_B_N, default_k(world_size), world_size)
                base = calls.ours_us(B200, family, call)
                for sign, factor in (("down", 1 - VARIED), ("up", 1 + VARIED)):
                    moved[f"{sign}_{m}"] = calls.ours_us(B200.scaled(name, factor), family, call) - base
            if any(moved.values()):
                row = {"measure": "model", "table": "sensitivity", "exchange": exchange.value}
                yield row | {"input": name} | moved


def checks(rows: Sequence[Mapping[str, Any]]) -> tuple[Check, ...]:
    """The claim that every comparison is within a tenth."""
    made = []
    for row in rows:
        if row["table"] == "comparison":
            miss = abs(row["ratio"] - 1)
            name = f"{row['machine']}, {row['what']}, M={row['m']}, K={row['k']}: |modelled / known - 1|"
            made.append(Check(name, miss, WITHIN, miss <= WITHIN))
    return tuple(made)


def all_rows(measured: Sequence[Report]) -> list[dict[str, Any]]:
    """All four tables."""
    return [*inputs(), *comparison(measured), *prediction(measured), *sensitivity()]
