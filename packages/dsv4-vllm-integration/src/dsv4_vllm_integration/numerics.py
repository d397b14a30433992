# SPDX-License-Identifier: Apache-2.0
"""`dsv4-vllm numerics`: how far each way of computing `wo_b` and its sum over ranks is from FP64.

No server and no vLLM: ranks are virtual, on one GPU or on the CPU. Beside the paths of `gemm_rs` stands what
vLLM computes without a fused kernel: every rank's partial, its own too, rounded to BF16, then summed in FP32
and rounded once (its Lamport and multicast kernels), or added hop by hop with a rounding to BF16 each (NCCL's
ring). Their noise is the spread over orders of the sum, which neither multicast hardware nor the choice of a
ring fixes; ours is measured by repeating the call.

Errors are given against two references: `kernel` on the operands as the product sees them, which judges the
arithmetic; `model` on activations before they were quantised, which judges what the model gets.

Operands are synthetic unless a file is given: rows whose size varies by powers of two, a few channels 16
times larger than the rest, as projections in trained transformers have, and weights whose block scales lie in
bytes 119 to 123, as in DeepSeek-V4.1's checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from dsv4_gemm_rs import Activation, Mxfp8, PreparedWeight, ScaleLayout, Workspace, gemm_rs, prepare_weight
from dsv4_gemm_rs.quantize import quantize_mxfp8
from dsv4_gemm_rs.reference import dequantize, gemm_reduce_scatter
from dsv4_symm_mem import ArgumentError, UnsupportedError, VirtualGroup, VirtualRank

LOUD_CHANNELS = 32
"""One channel in so many is loud."""
ORDERS = 24
"""Orders of summation that are tried, all of them for up to 4 ranks."""


@dataclass(frozen=True)
class Operands:
    """One rank's operands.

    Attributes:
        x: BF16 activations [M, K].
        weight: E4M3 [N, K].
        scale: E8M0 bytes [N, K/32].
    """

    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor

    def weight_exact(self) -> torch.Tensor:
        """The weight in FP64."""
        return dequantize(self.weight, self.scale)

    def x_seen(self, activation: Activation) -> torch.Tensor:
        """The activations that the product sees, in FP64."""
        if activation is Activation.BF16:
            return self.x.double()
        seen = quantize_mxfp8(self.x, layout=ScaleLayout.ROW_MAJOR)
        return dequantize(seen.data, seen.scale)


def synthetic(m: int, n: int, k: int, seed: int) -> Operands:
    """Operands as the module's docstring describes, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-3, 4, (m, 1), generator=generator).float().exp2()
    loud = torch.where(torch.rand(k, generator=generator) < 1 / LOUD_CHANNELS, 16.0, 1.0)
    x = (torch.randn(m, k, generator=generator) * rows * loud).to(torch.bfloat16)
    scale = torch.randint(119, 124, (n // 32, k // 32), generator=generator, dtype=torch.uint8)
    scale = scale.repeat_interleave(32, dim=0)
    # E4M3 weights that use most of a block's range, as quantised ones do.
    weight = (torch.randn(n, k, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Operands(x, weight, scale)


def load_operands(path: Path) -> list[Operands]:
    """One entry a rank from a file that `torch.save` wrote: a list of {"x", "weight", "scale"}.

    Raises:
        UnsupportedError: The file holds something else.
    """
    try:
        return [
            Operands(entry["x"], entry["weight"], entry["scale"])
            for entry in torch.load(path, map_location="cpu", weights_only=True)
        ]
    except (KeyError, TypeError) as error:
        raise UnsupportedError(f"{path} holds no list of x, weight and scale: {error}") from None


@dataclass(frozen=True)
class Figures:
    """One way of computing.

    Attributes:
        path: Its name.
        activation: What happens to activations before an MXFP8 weight.
        kernel_max: Largest absolute error against FP64 on the operands that the product sees.
        kernel_rms: Root mean square of that error over that of the result.
        model_rms: The same against FP64 on activations as they were.
        noise_max: Largest difference between two computations of the same result.
        noise_share: Elements that ever differed, a share.
    """

    path: str
    activation: str
    kernel_max: float
    kernel_rms: float
    model_rms: float
    noise_max: float
    noise_share: float


def _relative(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def _figures(
    path: str,
    activation: Activation,
    results: Sequence[torch.Tensor],
    seen: torch.Tensor,
    given: torch.Tensor,
) -> Figures:
    first = results[0]
    spread = torch.stack([(result.double() - first.double()).abs() for result in results]).amax(dim=0)
    return Figures(
        path,
        activation.value,
        float((first.double() - seen).abs().max()),
        _relative(first, seen),
        _relative(first, given),
        float(spread.max()),
        float((spread > 0).double().mean()),
    )


def _stock(ranks: Sequence[Operands], activation: Activation) -> dict[str, list[torch.Tensor]]:
    """What vLLM computes unfused, by the way it sums, in several orders; all rows of the result."""
    partials = [
        (rank.x_seen(activation) @ rank.weight_exact().T).to(torch.bfloat16).float() for rank in ranks
    ]
    results: dict[str, list[torch.Tensor]] = {"vLLM unfused": [], "vLLM unfused, NCCL": []}
    for order in itertools.islice(itertools.permutations(range(len(partials))), ORDERS):
        total = torch.zeros_like(partials[0])
        hops = torch.zeros_like(partials[0])
        for index in order:
            total += partials[index]
            hops = (hops + partials[index]).to(torch.bfloat16).float()
        results["vLLM unfused"].append(total.to(torch.bfloat16))
        results["vLLM unfused, NCCL"].append(hops.to(torch.bfloat16))
    return results


def _ours(
    ranks: Sequence[Operands],
    activation: Activation,
    path: str,
    device: torch.device,
    repeats: int,
) -> list[torch.Tensor]:
    """Results of `gemm_rs` by one path, all rows, one for each repeat."""
    m, n = ranks[0].x.shape[0], ranks[0].weight.shape[0]
    group = VirtualGroup(len(ranks), device)

    def call(rank: VirtualRank) -> list[torch.Tensor]:
        held = ranks[rank.rank]
        weight: PreparedWeight = prepare_weight(
            held.weight.to(device), held.scale.to(device), activation=activation
        )
        x: torch.Tensor | Mxfp8 = held.x.to(device)
        with Workspace.create(rank, max_tokens=m, n=n, path=path) as workspace:
            workspace.warm_up(weight)
            results = [gemm_rs(x, weight, workspace) for _ in range(repeats)]
            rank.synchronize()
            return [result.cpu() for result in results]

    shards = group.run(call)
    return [torch.cat([shard[repeat] for shard in shards])[:m] for repeat in range(repeats)]


def measure(
    ranks: Sequence[Operands], device: torch.device, paths: Sequence[str], repeats: int
) -> tuple[list[Figures], dict[str, str]]:
    """Figures of every way that can be had here, and why the others cannot."""
    figures = []
    missing: dict[str, str] = {}
    given = _whole(ranks, lambda rank: rank.x.double())
    for activation in Activation:
        seen = _whole(ranks, lambda rank, chosen=activation: rank.x_seen(chosen))  # type: ignore[misc]
        for name, stock in _stock(ranks, activation).items():
            figures.append(_figures(name, activation, stock, seen, given))
        for path in paths:
            try:
                results = _ours(ranks, activation, path, device, repeats)
            except UnsupportedError as error:
                missing[path] = str(error)
                continue
            figures.append(_figures(path, activation, results, seen, given))
    return figures, missing


def _whole(ranks: Sequence[Operands], activations: Callable[[Operands], torch.Tensor]) -> torch.Tensor:
    """The FP64 result, all rows."""
    m = ranks[0].x.shape[0]
    shards = gemm_reduce_scatter(
        [activations(rank) for rank in ranks], [rank.weight_exact() for rank in ranks]
    )
    return torch.cat(list(shards))[:m]


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "numerics", help="errors of fused and unfused paths against FP64, beside run-to-run noise; no server"
    )
    parser.add_argument("--ranks", type=int, default=4, help="virtual ranks (default 4)")
    parser.add_argument("--tokens", type=int, default=256, help="M (default 256)")
    parser.add_argument("--n", type=int, default=5120, help="N (default 5120)")
    parser.add_argument("--k", type=int, default=2048, help="K of one rank (default 2048)")
    parser.add_argument("--repeats", type=int, default=3, help="calls of each path (default 3)")
    parser.add_argument("--operands", type=Path, help="real operands, see the module's documentation")
    parser.add_argument("--device", default=None, help="default: cuda if there is one, else cpu")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table; returns 0."""
    if options.operands is not None:
        ranks = load_operands(options.operands)
    else:
        if options.n % 64 or options.k % 128:
            raise ArgumentError("n, k", (options.n, options.k), "multiples of 64 and 128")
        ranks = [synthetic(options.tokens, options.n, options.k, seed) for seed in range(options.ranks)]
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    paths = ["fused", "unfused"] if device.type == "cuda" else ["fused", "host"]
    figures, missing = measure(ranks, device, paths, options.repeats)
    if options.json:
        print(json.dumps({"figures": [asdict(entry) for entry in figures], "missing": missing}, indent=1))
        return 0
    print("| path | activations | max error | rms error | rms error of the model | noise | elements |")
    print("|---|---|---|---|---|---|---|")
    for entry in figures:
        digits = max(0, 4 - math.ceil(math.log10(entry.kernel_max))) if entry.kernel_max > 0 else 1
        print(
            f"| {entry.path} | {entry.activation} | {entry.kernel_max:.{digits}f} | {entry.kernel_rms:.2e} "
            f"| {entry.model_rms:.2e} | {entry.noise_max:.{digits}f} | {100 * entry.noise_share:.3f} % |"
        )
    for path, why in missing.items():
        print(f"{path}: {why}")
    return 0
