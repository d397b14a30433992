# SPDX-License-Identifier: Apache-2.0
"""The cases and the loop over them; other projects' kernels are measured beside ours in the same process."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import dsv4_mhc
from dsv4_mhc.bench.accuracy import coefficient_errors
from dsv4_mhc.bench.bytes import STREAM_UNITS, floor_bytes
from dsv4_mhc.bench.checks import checks
from dsv4_mhc.bench.others import tile_kernels_calls
from dsv4_mhc.bench.timing import copy_bandwidth, graph_median
from dsv4_mhc.errors import UnsupportedError
from dsv4_mhc.plan import Quant

L2_TIMES = 2.5
"""A cold run's operands are this many times the L2."""
SETS = 64
"""At most so many sets of operands: with few tokens the weights alone, of which each set has its own, exceed
the L2, as those of a model's layers do; the streams do not, nor do they in a model, which has just written
them."""
DISTRIBUTIONS = ("dsv4-mhc", "torch", "tilelang", "apache-tvm-ffi", "tile-kernels")


class Operands:
    """Inputs and outputs of one call of everything."""

    def __init__(self, tokens: int, hidden: int, weights: dict[str, torch.Tensor]) -> None:
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        single: dict[str, Any] = {"device": "cuda", "dtype": torch.float32}
        self.residual = torch.randn(tokens, 4, hidden, **options)
        self.output = torch.randn(tokens, hidden, **options)
        self.post = torch.rand(tokens, 4, **single)
        self.comb = torch.rand(tokens, 4, 4, **single)
        self.carried = torch.rand(tokens, 4, **single)
        self.memory = torch.empty(0)
        self.residual_out = torch.empty_like(self.residual)
        self.y = torch.empty_like(self.output)
        self.weights = weights
        self.coefficients = (
            torch.empty_like(self.post),
            torch.empty_like(self.post),
            torch.empty_like(self.comb),
        )
        self.codes = torch.empty(tokens, hidden, device="cuda", dtype=torch.float8_e4m3fn)
        scales = -(-tokens // 128) * 128 * -(-hidden // 128) * 4
        self.scales = torch.zeros(scales, device="cuda", dtype=torch.uint8)


def make_weights(hidden: int) -> dict[str, torch.Tensor]:
    """The weights of a site."""
    fn = torch.randn(24, 4 * hidden, device="cuda") * (4 * hidden) ** -0.5
    return {
        "weight": dsv4_mhc.pack_weight(fn),
        "head": dsv4_mhc.pack_weight(fn[:4].contiguous()),
        "scale": torch.ones(3, device="cuda"),
        "base": torch.zeros(24, device="cuda"),
        "norm": torch.ones(hidden, device="cuda", dtype=torch.bfloat16),
    }


def call(case: str, o: Operands) -> None:
    """One call of a case, into given outputs."""
    w = o.weights
    projection = (w["weight"], w["scale"], w["base"])
    done = (o.output, o.post, o.comb)
    both = dsv4_mhc.Seam(*o.coefficients, o.residual_out, o.y)
    only = dsv4_mhc.Seam(*o.coefficients, None, o.y)
    if case == "expand":
        dsv4_mhc.expand(o.output, out=o.residual_out)
    elif case == "mean":
        dsv4_mhc.stream_mean(o.residual, out=o.y)
    elif case == "post":
        dsv4_mhc.post(o.residual, *done, out=o.residual_out)
    elif case == "collapse":
        dsv4_mhc.collapse(o.residual, o.carried, norm_weight=w["norm"], out=o.y)
    elif case == "collapse_bare":
        dsv4_mhc.collapse(o.residual, o.carried, out=o.y)
    elif case == "pre_coupled":
        dsv4_mhc.pre(o.residual, *projection, norm_weight=w["norm"], out=only)
    elif case == "pre_shifted":
        dsv4_mhc.pre(o.residual, *projection, carried=o.carried, norm_weight=w["norm"], out=only)
    elif case == "seam_coupled":
        dsv4_mhc.seam(o.residual, *done, *projection, norm_weight=w["norm"], out=both)
    elif case == "seam_shifted":
        dsv4_mhc.seam(o.residual, *done, *projection, carried=o.carried, norm_weight=w["norm"], out=both)
    elif case == "seam_shifted_mxfp8":
        out = dsv4_mhc.Seam(*o.coefficients, o.residual_out, None, o.codes, o.scales)
        dsv4_mhc.seam(
            *(o.residual, *done, *projection),
            carried=o.carried,
            norm_weight=w["norm"],
            bf16=False,
            quant=Quant.MXFP8,
            out=out,
        )
    elif case == "tail_shifted":
        tail = dsv4_mhc.Tail(o.y, None, None)
        dsv4_mhc.tail(o.residual, *done, o.carried, norm_weight=w["norm"], out=tail)
    elif case == "tail_head":
        dsv4_mhc.head(
            *(o.residual, w["head"], w["scale"][:1], w["base"][:4]),
            output=o.output,
            post=o.post,
            comb=o.comb,
            norm_weight=w["norm"],
            out=o.y,
        )
    else:
        if not o.memory.numel():
            tokens, hidden = o.output.shape
            o.memory = torch.randn(tokens, 5, hidden, device="cuda", dtype=torch.bfloat16)
            o.weights.setdefault("open", torch.ones(tokens, device="cuda", dtype=torch.uint8))
        gate = o.weights["open"][: o.output.shape[0]]
        dsv4_mhc.engram_seam(
            *(o.residual, o.memory, w["norm"], w["norm"], gate, o.carried, *projection),
            output=o.output,
            post=o.post,
            comb=o.comb,
            norm_weight=w["norm"],
            out=both,
        )


def rotating(tokens: int, hidden: int) -> list[Operands]:
    """Sets of operands that exceed the L2, at most `SETS`."""
    one = 11 * tokens * hidden * 2
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    wanted = min(SETS, max(2, round(L2_TIMES * l2 / one) + 1))
    return [Operands(tokens, hidden, make_weights(hidden)) for _ in range(wanted)]


def report_of(
    name: str, measured_on: dict[str, Any], rows: list[dict[str, Any]], found: list[dict[str, Any]]
) -> dict[str, Any]:
    """A result file's contents: rows and checks, and what, when and on what this command measured."""
    return {
        "name": name,
        "machine": measured_on,
        "versions": versions(),
        "command": "dsv4-mhc " + shlex.join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": rows,
        "checks": found,
        "schema": 1,
    }


def run(
    tokens: Sequence[int],
    hidden: Sequence[int],
    samples: int,
    cases: Sequence[str] | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Measure every case at every size.

    Raises:
        UnsupportedError: No CUDA device.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("bench needs a CUDA device, and torch sees none")
    bandwidth = copy_bandwidth()
    rows: list[dict[str, Any]] = []
    names = [name for name in STREAM_UNITS if cases is None or name.startswith(tuple(cases))]
    for width in hidden:
        for count in tokens:
            sets = rotating(count, width)
            tasks: dict[str, list[Callable[[], None]]] = {
                name: [partial(call, name, operands) for operands in sets] for name in names
            }
            if cases is None:
                every = [tile_kernels_calls(operands) for operands in sets]
                tasks |= {name: [calls[name] for calls in every] for name in every[0]}
            for name, calls in tasks.items():
                floor = floor_bytes(name.split("/")[0], count, width) / bandwidth
                row = {"measure": "mhc", "case": name, "tokens": count, "hidden": width, "floor_us": floor}
                try:
                    row["warm_us"] = graph_median(calls[:1], 20, samples)
                    row["cold_us"] = graph_median(calls, max(1, 20 // len(calls)), samples)
                except Exception as error:  # One case that fails must not lose the others' numbers.
                    row["error"] = f"{type(error).__name__}: {error}"[:300]
                rows.append(row)
                progress(str(row))
            del sets, tasks
    errors = [row for width in hidden for row in coefficient_errors(width)]
    measured_on = {**machine(), "copy_bytes_per_us": bandwidth}
    return report_of("mhc", measured_on, [*rows, *errors], checks(rows, errors))


def machine() -> dict[str, Any]:
    """The GPU that is measured, and what drives it."""
    properties = torch.cuda.get_device_properties(0)
    version = Path("/sys/module/nvidia/version")
    return {
        "device": properties.name,
        "arch": 10 * properties.major + properties.minor,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": version.read_text(encoding="utf-8").strip() if version.exists() else "unknown",
        "cuda": torch.version.cuda,
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Python and the distributions that are installed of those that matter."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
