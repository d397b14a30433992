# SPDX-License-Identifier: Apache-2.0
"""The SM100 kernel behind the public API, in the PTX emulator: quantiser, dispatcher, workspace and kernel.

Every configuration by itself is in test_sm100_emulated.py. Here calls come the way a model makes them, and
are held against FP64 and against what the SM90 kernel makes of the same operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from dsv4_gemm_rs import WeightKind
from dsv4_gemm_rs.dispatch import Gemm, Path, Problem
from dsv4_gemm_rs.kernels.cache import quantizer_kernel
from dsv4_gemm_rs.kernels.families import Family, Operand, TileConfig, operand_of
from dsv4_gemm_rs.kernels.sm90.config import KernelConfig as Sm90Config
from dsv4_gemm_rs.kernels.sm100.config import KernelConfig
from dsv4_gemm_rs.problems import RankProblem
from dsv4_gemm_rs.quantize import ScaleLayout, quantize_mxfp8
from dsv4_gemm_rs.quantize.layout import k_tiles, padded_rows, scale_shape
from dsv4_gemm_rs.weights import Activation, prepare_weight
from emulated_ranks import Ranks, ranks
from gemm_rs_cases import CHANGED, difference_allowed, joined, values
from gemm_rs_support import assert_right, problems_for

library = pytest.importorskip(
    "dsv4_ptx_emulator.runtime.library", reason="dsv4-ptx-emulator is not installed"
)
pytestmark = pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle())

ARCH = "sm_100a"
MXFP8 = WeightKind.MXFP8
PAIR = KernelConfig(Operand.MXFP8, 128, 2)
MakeEmulation = Callable[..., Any]


def smallest(rates: Any, family: Family, *shape: int) -> TileConfig:
    """Most tiles, hence most exchange, for the fewest instructions; of the operands that the call has."""
    return family[-1]


def on_sm90(
    size: int, problems: Sequence[RankProblem], emulator: MakeEmulation, xs: Sequence[Any] | None = None
) -> list[torch.Tensor]:
    m, n = problems[0].x.shape[0], problems[0].weight.n
    with ranks(emulator(size), m, n, config=Sm90Config(64, 128)) as group:
        outs = group.call(problems, xs)
        group.finish()
    return outs


def assert_near(outs: Sequence[torch.Tensor], others: Sequence[torch.Tensor], problems: Any) -> None:
    """Within what two orders of FP32 addition within K can do to a BF16 result, see gemm_rs_cases.py."""
    left, right = joined(outs), joined(others)
    assert bool(((values(left) - values(right)).abs() <= difference_allowed(problems)).all())
    assert float((left != right).mean()) <= CHANGED


def assert_kept(problems: Sequence[RankProblem]) -> None:
    """No weight has become BF16: the kernel multiplied what was given."""
    assert all(problem.weight._bf16 is None for problem in problems)


@pytest.mark.parametrize(
    ("size", "m", "n", "config"),
    [(2, 131, 192, smallest), (4, 129, 64, smallest), (2, 257, 192, PAIR)],
    ids=["P2", "P4", "P2-pair"],
)
def test_right_and_near_sm90(size: int, m: int, n: int, config: Any, emulator: MakeEmulation) -> None:
    problems = problems_for(size, m, n, 256, MXFP8, seed=m)
    with ranks(emulator(size, arch=ARCH, processors=2), m, n, config=config) as group:
        group.poison()
        outs = group.call(problems)
        group.finish()
    assert_right(outs, problems)
    assert_kept(problems)
    assert_near(outs, on_sm90(size, problems, emulator), problems)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_eight_ranks(seed: int, emulator: MakeEmulation) -> None:
    size, m, n = 8, 517, 192
    problems = {rows: problems_for(size, rows, n, 384, MXFP8, seed=rows) for rows in (m, 7, 130)}
    with ranks(emulator(size, arch=ARCH, processors=2, seed=seed), m, n, config=smallest) as group:
        group.poison()
        outs = {rows: group.call(mine) for rows, mine in problems.items()}
        group.finish()
    for rows, mine in problems.items():
        assert_right(outs[rows], mine)
    assert_near(outs[m], on_sm90(size, problems[m], emulator), problems[m])


def test_activations_may_come_quantised(emulator: MakeEmulation) -> None:
    """BF16, E4M3 with scales in either layout, and the output of our own quantiser: equal bits."""
    size, m, n, k = 2, 70, 64, 256
    problems = problems_for(size, m, n, k, MXFP8)
    plain = [quantize_mxfp8(p.x, layout=ScaleLayout.ROW_MAJOR) for p in problems]
    forms: list[list[Any]] = [
        [p.x for p in problems],
        [quantize_mxfp8(p.x) for p in problems],
        [(q.data, q.scale) for q in plain],
    ]
    with ranks(emulator(size, arch=ARCH), m, n, config=smallest) as group:
        results = [group.call(problems, xs) for xs in forms]
        group.finish()
    assert_right(results[0], problems)
    assert_kept(problems)
    for outs in results[1:]:
        assert all(torch.equal(got, want) for got, want in zip(outs, results[0], strict=True))


def test_the_quantising_kernel_feeds_the_fused_one(emulator: MakeEmulation) -> None:
    """Both are compiled for SM100 and run on one stream, nothing in between."""
    from dsv4_gemm_rs.quantize import kernel
    from dsv4_gemm_rs.quantize.rule import BLOCK, ScaleRule

    size, m, n, k = 2, 67, 64, 256
    problems = problems_for(size, m, n, k, MXFP8)
    emulation = emulator(size, arch=ARCH)
    with ranks(emulation, m, n, config=smallest) as group:
        xs = []
        for problem, device in zip(problems, emulation.accelerators, strict=True):
            data = torch.zeros(m, k, dtype=torch.float8_e4m3fn)
            scale = torch.full(scale_shape(m, k, ScaleLayout.SWIZZLED), 0xFF, dtype=torch.uint8)
            scale_rows = padded_rows(m)
            grid_x, grid_y, across_log2 = kernel.grid(scale_rows, k_tiles(k))
            quantizer_kernel(torch.bfloat16, ScaleLayout.SWIZZLED)(
                *(problem.x.data_ptr(), data.data_ptr(), scale.data_ptr()),
                *(m, scale_rows, k // BLOCK, 2 * k, 1, kernel.ROUND_UP[ScaleRule.VLLM]),
                *(across_log2, grid_x, grid_y),
                stream=device.current_stream(),
                memory=(problem.x, data, scale),
            )
            xs.append((data, scale))
        outs = group.call(problems, xs)
        group.finish()
    assert_right(outs, problems)
    for (data, scale), problem in zip(xs, problems, strict=True):
        want = quantize_mxfp8(problem.x)
        assert torch.equal(data.view(torch.uint8), want.data.view(torch.uint8))
        assert torch.equal(scale, want.scale)


def test_calls_of_changing_kind_and_length_share_a_workspace(emulator: MakeEmulation) -> None:
    """MXFP8, BF16, and MXFP8 weights with activations left in BF16, several calls queued at once."""
    size, n, k = 2, 128, 128
    cases: dict[str, list[RankProblem]] = {
        "mxfp8": problems_for(size, 131, n, k, MXFP8),
        "bf16": problems_for(size, 66, n, k, WeightKind.BF16),
        "short": problems_for(size, 1, n, k, MXFP8),
        "none": problems_for(size, 0, n, k, MXFP8),
        "mixed": [
            RankProblem(
                p.x,
                prepare_weight(p.weight.data, p.weight.scale, activation=Activation.BF16),
                p.x.double(),
                p.weight_exact,
            )
            for p in problems_for(size, 65, n, k, MXFP8, seed=3)
        ],
    }
    with ranks(emulator(size, arch=ARCH, processors=2), 131, n, config=smallest) as group:
        taken = {
            name: operand_of(group.workspaces[0].plan(Problem(8, n, k, kind)).config)
            for name, kind in (("mxfp8", MXFP8), ("bf16", WeightKind.BF16))
        }
        assert taken == {"mxfp8": Operand.MXFP8, "bf16": Operand.BF16}
        first = {name: group.call(problems) for name, problems in cases.items()}
        group.finish()
        for name, problems in cases.items():
            assert_right(first[name], problems)
        assert_kept(cases["mxfp8"])
        group.poison()
        order = ("short", "mixed", "mxfp8", "none", "bf16", "mxfp8", "short")
        again = [(name, group.call(cases[name])) for name in order]
        group.finish()
        for name, outs in again:
            assert all(torch.equal(got, want) for got, want in zip(outs, first[name], strict=True))
        for space in group.workspaces:
            assert space.exchange is not None
            assert space.exchange.epoch == len(cases) + len(order)


def test_graphs_replay_with_changed_inputs_between_eager_calls(emulator: MakeEmulation) -> None:
    """An odd number of calls in the graph, and of replays: banks and epochs go on as they must."""
    size, m, n, k = 2, 67, 64, 128
    problems = problems_for(size, m, n, k, MXFP8)
    quantised = [quantize_mxfp8(p.x) for p in problems]
    emulation = emulator(size, arch=ARCH)
    with ranks(emulation, m, n, config=smallest) as group:
        with emulation.capture() as graph:
            captured = group.call(problems, quantised)
        for replay in range(3):
            fresh = problems_for(size, m, n, k, MXFP8, seed=replay + 7)
            for q, p in zip(quantised, fresh, strict=True):
                quantize_mxfp8(p.x, out=q)
            now = [replace(p, x=f.x, x_exact=f.x_exact) for p, f in zip(problems, fresh, strict=True)]
            graph.replay()
            eager = group.call(now)
            group.finish()
            assert_right(captured, now)
            assert all(torch.equal(got, want) for got, want in zip(captured, eager, strict=True))


def gemm_of(group: Ranks, problems: Sequence[RankProblem]) -> Gemm:
    weight = problems[0].weight
    return group.workspaces[0].decide(Problem(problems[0].x.shape[0], weight.n, weight.k, weight.kind)).gemm


def test_the_dispatcher_decides(emulator: MakeEmulation) -> None:
    """Nothing asked for, nothing forced: few tokens go unfused, others fused, both through the same slots."""
    size, n = 2, 64
    few, many = (problems_for(size, m, n, 128, MXFP8, seed=m) for m in (9, 130))
    with ranks(emulator(size, arch=ARCH), 130, n, config=None, path=None) as group:
        group.group.run(lambda rank: group.workspaces[rank.rank].warm_up(many[rank.rank].weight))
        assert (gemm_of(group, few), gemm_of(group, many)) == (Gemm.BF16, Gemm.FUSED_SM100)
        results = [(problems, group.call(problems)) for problems in (few, many, few)]
        group.finish()
        for problems, outs in results:
            assert_right(outs, problems)
        for space in group.workspaces:
            assert space.counters.calls == {"fused": 1, "unfused": 2}
            assert not space.counters.fallbacks


def test_fused_and_unfused_ranks_meet_in_one_call(emulator: MakeEmulation) -> None:
    problems = problems_for(2, 100, 128, 128, MXFP8)
    with ranks(emulator(2, arch=ARCH), 100, 128, config=smallest) as group:
        group.workspaces[1].requested = Path.UNFUSED
        outs = group.call(problems)
        group.finish()
    assert_right(outs, problems)
