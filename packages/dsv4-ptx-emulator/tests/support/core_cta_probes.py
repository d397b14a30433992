# SPDX-License-Identifier: Apache-2.0
"""Probes of warps and CTAs together, and of special registers (PTX ISA 9.7.15.1, 9.7.15.3, 9.7.10.26, 10)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from core_rows import Group, Row, each
from core_warp_probes import shuffled_operands
from numpy.typing import NDArray

ALL = 0xFFFF_FFFF
WARPS = 4
"""Warps of a CTA of the barriers' group."""


def _ctas(function: Callable[[list[int], list[int]], list[int]]) -> Callable[..., list[int | None]]:
    """Expected results of a function of one CTA's operands."""

    def whole(*inputs: NDArray[Any]) -> list[int | None]:
        columns = [values.reshape(-1, 32 * WARPS).tolist() for values in inputs]
        return [result for a, b in zip(*columns[:2], strict=True) for result in function(a, b)]

    return whole


def _barriers() -> Iterator[Row]:
    other = "xor.b32 %r20, $t, 96; sub.u32 %r21, %r20, $t; mul.lo.u32 %r21, %r21, 64; add.u32 %r21, $s, %r21;"
    for number, name in enumerate(("bar.sync", "barrier.sync", "barrier.cta.sync", "barrier.sync.aligned")):
        code = (
            f"{name} {number}; {other} st.shared.b32 [$s], $a; {name} {number}, 128; "
            "ld.shared.b32 $o, [%r21];"
        )
        yield Row(f"{name}-{number}", code, 4, _ctas(lambda a, b: [a[k ^ 96] for k in range(32 * WARPS)]))
    # Warps 0 and 1 hand over to warps 2 and 3: arrive at one barrier, sync at it.
    code = (
        f"bar.sync 0; {other} st.shared.b32 [$s], $a; setp.lt.u32 %p1, $t, 64; mov.b32 $o, $b; "
        f"@!%p1 bra ${{L}}A; "
        "bar.arrive 5, 128; bra ${L}B; ${L}A: bar.sync 5, 128; ld.shared.b32 $o, [%r21]; ${L}B: bar.sync 0;"
    )
    yield Row(
        "bar.arrive",
        code,
        4,
        _ctas(lambda a, b: [b[k] if k < 64 else a[k ^ 96] for k in range(32 * WARPS)]),
    )
    code = (
        "bar.sync 0; xor.b32 %r20, $t, 32; sub.u32 %r21, %r20, $t; mul.lo.u32 %r21, %r21, 64; "
        "add.u32 %r21, $s, %r21; "
        "shr.u32 %r22, $t, 6; add.u32 %r22, %r22, 6; st.shared.b32 [$s], $b; bar.sync %r22, 64; "
        "ld.shared.b32 $o, [%r21];"
    )
    yield Row("bar.sync-register", code, 4, _ctas(lambda a, b: [b[k ^ 32] for k in range(32 * WARPS)]))
    tests = {"sign": ("setp.lt.s32 %p1, $a, 0;", 31), "all": ("setp.eq.u32 %p1, $a, $a;", 32)}
    for test, (code, shift) in tests.items():

        def ones(a: list[int], shift: int = shift) -> int:
            return sum(x >> 31 for x in a) if shift == 31 else len(a)

        yield Row(
            f"bar.red.popc.u32-{test}",
            f"{code} bar.red.popc.u32 $o, 3, %p1;",
            4,
            _ctas(lambda a, b, ones=ones: [ones(a)] * (32 * WARPS)),  # type: ignore[misc]
        )
        for kind in ("and", "or"):
            text = f"{code} bar.red.{kind}.pred %p2, 4, 128, !%p1; selp.b32 $$o, 1, 0, %p2;".replace(
                "$$", "$"
            )

            def both(
                a: list[int], b: list[int], kind: str = kind, ones: Callable[[list[int]], int] = ones
            ) -> list[int]:
                found = ones(a)
                return [int(found == 0 if kind == "and" else found < len(a))] * (32 * WARPS)

            yield Row(f"bar.red.{kind}.pred-{test}", text, 4, _ctas(both))


def _clusters() -> Iterator[Row]:
    """CTA pairs read each other's shared memory."""
    for arrive, wait in (
        ("barrier.cluster.arrive", "barrier.cluster.wait"),
        ("barrier.cluster.arrive.release.aligned", "barrier.cluster.wait.acquire.aligned"),
        ("fence.acq_rel.cluster; barrier.cluster.arrive.relaxed", "barrier.cluster.wait.acquire"),
    ):
        meet = f"{arrive}; {wait};"
        code = (
            f"{meet} st.shared.b32 [$s], $a; {meet} mov.u32 %r20, %cluster_ctarank; xor.b32 %r20, %r20, 1; "
            "mapa.shared::cluster.u32 %r21, $s, %r20; ld.shared::cluster.b32 $o, [%r21];"
        )
        yield Row(f"{arrive.split('; ')[-1]}-{wait}", code, 4, _other_cta(lambda a, b: a))
    meet = "barrier.cluster.arrive; barrier.cluster.wait;"
    remote = "mov.u32 %r20, %cluster_ctarank; xor.b32 %r20, %r20, 1; mapa.shared::cluster.u32 %r21, $s, %r20;"
    code = f"{meet} {remote} st.shared::cluster.b32 [%r21+8], $b; {meet} ld.shared.b32 $o, [$s+8];"
    yield Row("st.shared::cluster", code, 4, _other_cta(lambda a, b: b))
    code = (
        f"{meet} {remote} st.shared.b32 [$s], $a; "
        f"{meet} red.relaxed.cluster.shared::cluster.add.u32 [%r21], 7; {meet} "
        "ld.shared.b32 $o, [$s];"
    )
    yield Row("red.shared::cluster.add.u32", code, 4, each(lambda a, b: a + 7 & ALL))
    code = (
        f"{meet} {remote} st.shared.b32 [$s], $a; "
        f"{meet} atom.relaxed.cluster.shared::cluster.exch.b32 $o, [%r21], $b; "
        f"{meet}"
    )
    yield Row("atom.shared::cluster.exch.b32", code, 4, _other_cta(lambda a, b: a))
    code = (
        f"{meet} cvt.u64.u32 %d30, $s; cvta.shared.u64 %d30, %d30; st.shared.b32 [$s], $a; {meet} "
        "mov.u32 %r20, %cluster_ctarank; xor.b32 %r20, %r20, 1; mapa.u64 %d31, %d30, %r20; "
        "ld.b32 $o, [%d31]; "
        # A CTA's shared memory ends with the CTA.
        f"{meet}"
    )
    yield Row("mapa.u64", code, 4, _other_cta(lambda a, b: a))
    code = (
        "mov.u32 %r20, %cluster_ctarank; xor.b32 %r20, %r20, 1; mapa.shared::cluster.u32 %r21, $s, %r20; "
        "getctarank.shared::cluster.u32 %r22, %r21; getctarank.shared::cluster.u32 %r23, $s; "
        "shl.b32 %r22, %r22, 4; "
        "or.b32 $o, %r22, %r23;"
    )
    yield Row("getctarank", code, 4, _by_thread(lambda i: (i // 128 % 2 ^ 1) << 4 | i // 128 % 2))


def _other_cta(function: Callable[[int, int], int]) -> Callable[..., list[int | None]]:
    def whole(*inputs: NDArray[Any]) -> list[int | None]:
        a, b = (values.tolist() for values in inputs)
        return [function(a[k ^ 128], b[k ^ 128]) for k in range(len(a))]

    return whole


def _by_thread(function: Callable[[int], int]) -> Callable[..., list[int | None]]:
    return lambda *inputs: [function(k) for k in range(len(inputs[0]))]


def _special(cluster: int) -> Iterator[Row]:
    """Registers that the launch decides; of those that the hardware does, only what is sure."""
    count, threads, grid = 512, 128, 4
    registers: dict[str, Callable[[int], int]] = {
        "%tid.x": lambda i: i % threads,
        "%tid.y": lambda i: 0,
        "%tid.z": lambda i: 0,
        "%ntid.x": lambda i: threads,
        "%ntid.y": lambda i: 1,
        "%ntid.z": lambda i: 1,
        "%ctaid.x": lambda i: i // threads,
        "%ctaid.y": lambda i: 0,
        "%ctaid.z": lambda i: 0,
        "%nctaid.x": lambda i: grid,
        "%nctaid.y": lambda i: 1,
        "%nctaid.z": lambda i: 1,
        "%laneid": lambda i: i % 32,
        "%lanemask_eq": lambda i: 1 << i % 32,
        "%lanemask_le": lambda i: (2 << i % 32) - 1,
        "%lanemask_lt": lambda i: (1 << i % 32) - 1,
        "%lanemask_ge": lambda i: ALL & ~((1 << i % 32) - 1),
        "%lanemask_gt": lambda i: ALL & ~((2 << i % 32) - 1),
        "%clusterid.x": lambda i: i // threads // cluster,
        "%clusterid.y": lambda i: 0,
        "%nclusterid.x": lambda i: grid // cluster,
        "%nclusterid.z": lambda i: 1,
        "%cluster_ctaid.x": lambda i: i // threads % cluster,
        "%cluster_ctaid.y": lambda i: 0,
        "%cluster_nctaid.x": lambda i: cluster,
        "%cluster_nctaid.z": lambda i: 1,
        "%cluster_ctarank": lambda i: i // threads % cluster,
        "%cluster_nctarank": lambda i: cluster,
        "%dynamic_smem_size": lambda i: 0,
    }
    for name, function in registers.items():
        yield Row(name, f"mov.u32 $o, {name};", 4, _by_thread(function))
    yield Row(
        "%is_explicit_cluster",
        "mov.pred %p1, %is_explicit_cluster; selp.b32 $o, 1, 0, %p1;",
        4,
        _by_thread(lambda i: int(cluster > 1)),
    )
    yield Row(
        "%total_smem_size",
        f"mov.u32 %r20, %total_smem_size; setp.ge.u32 %p1, %r20, {64 * threads}; selp.b32 $o, 1, 0, %p1;",
        4,
        _by_thread(lambda i: 1),
    )
    for clock in ("%clock64", "%globaltimer"):
        yield Row(
            clock,
            f"mov.u64 %d30, {clock}; bar.sync 0; nanosleep.u32 5000; mov.u64 %d31, {clock}; "
            "setp.ge.u64 %p1, %d31, %d30; selp.b32 $o, 1, 0, %p1;",
            4,
            _by_thread(lambda i: 1),
        )
    yield Row(
        "%smid",
        "mov.u32 %r20, %smid; mov.u32 %r21, %nsmid; setp.lt.u32 %p1, %r20, %r21; selp.b32 $o, 1, 0, %p1;",
        4,
        _by_thread(lambda i: 1),
    )
    assert count == threads * grid


def groups() -> Iterator[Group]:
    """All of them."""
    _, chosen = shuffled_operands()
    yield Group("barriers", chosen, tuple(_barriers()), threads=32 * WARPS, scratch=True, seeds=2)
    yield Group("cluster", chosen, tuple(_clusters()), threads=128, cluster=2, scratch=True, seeds=2)
    for cluster in (1, 2):
        rows = tuple(_special(cluster))
        yield Group(f"special-registers-{cluster}", chosen, rows, threads=128, cluster=cluster, scratch=True)
