# SPDX-License-Identifier: Apache-2.0
"""What else a user of several GPUs could run: NCCL, PyTorch's fused operator, an FP8 GEMM, and the bare link.

Only between processes with a GPU each; virtual ranks have nothing to compare with. The FP8 product with one
scale per row and column is a ceiling, not an alternative: it cannot express MXFP8's block scales. The copy
over the link moves what a rank must send, by the copy engine, all ranks at once; it is the floor that this
machine reached in this run, beside the data sheet's.

Trap: PyTorch's operator and its symmetric memory rendezvous and allocate at first use, so every case here
makes its first call outside any capture, as `time_case` does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from dsv4_symm_mem.arena import SymmetricArena
from dsv4_symm_mem.communicator import Communicator, ProcessGroupCommunicator

from dsv4_gemm_rs.bench.timing import Step

FP8_MAX = 448.0


class Alternatives:
    """One rank's buffers for the alternatives; `close` is collective, as is the making.

    Args:
        rank: This process's rank.
        xs: Rotating BF16 activations [M, K], as the product sees them.
        weights: Their BF16 weights [N, K].
    """

    def __init__(
        self, rank: ProcessGroupCommunicator, xs: list[torch.Tensor], weights: list[torch.Tensor]
    ) -> None:
        self._rank, self._xs, self._weights = rank, xs, weights
        m, n = xs[0].shape[0], weights[0].shape[0]
        self._rows = -(-m // rank.size)
        device = xs[0].device
        padded = (self._rows * rank.size, n)
        # NCCL wants equal shards: rows past M are padding that travels like the rest.
        self._partials = [torch.zeros(padded, dtype=torch.bfloat16, device=device) for _ in xs]
        self._outs = [torch.empty(self._rows, n, dtype=torch.bfloat16, device=device) for _ in xs]
        self._m = m
        self._fp8 = [(_row_scaled(x), _row_scaled(w)) for x, w in zip(xs, weights, strict=True)]
        self._arena = SymmetricArena.create(rank, 2 * padded[0] * n + 128)
        self._landing = self._arena.allocate((rank.size, self._rows, n), torch.bfloat16, "landing")

    def close(self) -> None:
        """Free the symmetric memory; collective."""
        self._arena.close()

    def cases(self) -> Iterator[tuple[str, Step]]:
        """A name and the step that performs one call of it."""
        yield "gemm-fp8-row-scaled", self.fp8
        yield "nccl-reduce-scatter", self.nccl
        yield "gemm-then-nccl", self.gemm_then_nccl
        yield "nccl-all-reduce", self.nccl_all_reduce
        yield "gemm-then-nccl-all-reduce", self.gemm_then_nccl_all_reduce
        if self._m % self._rank.size == 0:
            yield "torch-fused", self.torch_fused
        yield "link-copy", self.copy

    def fp8(self, rank: Communicator, which: int) -> None:
        """An FP8 product with one scale per row of x and of W."""
        (x, x_scale), (weight, weight_scale) = self._fp8[which]
        torch._scaled_mm(x, weight.T, scale_a=x_scale, scale_b=weight_scale.T, out_dtype=torch.bfloat16)

    def nccl(self, rank: Communicator, which: int) -> None:
        """NCCL's reduce-scatter of a finished partial."""
        dist.reduce_scatter_tensor(self._outs[which], self._partials[which], group=self._rank.group)

    def gemm_then_nccl(self, rank: Communicator, which: int) -> None:
        """The library's BF16 product, then NCCL."""
        torch.matmul(self._xs[which], self._weights[which].T, out=self._partials[which][: self._m])
        self.nccl(rank, which)

    def nccl_all_reduce(self, rank: Communicator, which: int) -> None:
        """NCCL's all-reduce of a finished partial, in place."""
        dist.all_reduce(self._partials[which][: self._m], group=self._rank.group)

    def gemm_then_nccl_all_reduce(self, rank: Communicator, which: int) -> None:
        """The library's BF16 product, then NCCL's all-reduce."""
        torch.matmul(self._xs[which], self._weights[which].T, out=self._partials[which][: self._m])
        self.nccl_all_reduce(rank, which)

    def torch_fused(self, rank: Communicator, which: int) -> None:
        """PyTorch's `fused_matmul_reduce_scatter`, which asks for M divisible by P."""
        torch.ops.symm_mem.fused_matmul_reduce_scatter(
            self._xs[which], self._weights[which].T, "sum", 0, self._rank.group.group_name
        )

    def copy(self, rank: Communicator, which: int) -> None:
        """The shards of every other rank, copied to it."""
        for distance in range(1, self._rank.size):
            peer = (self._rank.rank + distance) % self._rank.size
            rows = slice(peer * self._rows, (peer + 1) * self._rows)
            self._landing.peers[peer][self._rank.rank].copy_(self._partials[which][rows])


def _row_scaled(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = values.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / FP8_MAX
    return (values / scale).to(torch.float8_e4m3fn), scale
