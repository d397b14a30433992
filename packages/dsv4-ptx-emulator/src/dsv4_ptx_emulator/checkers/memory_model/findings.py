# SPDX-License-Identifier: Apache-2.0
"""What the memory model's checker reports: a rule, where the ISA states it, and two lines of PTX."""

from __future__ import annotations

from dataclasses import dataclass

RULES: dict[str, tuple[str, str]] = {
    "race": ("8.7.1", "conflicting accesses that nothing orders"),
    "weak-flag": ("8.7.1", "a weak access that conflicts with a strong one, and nothing orders them"),
    "mixed-size": ("8.7.2", "strong accesses of different sizes to the same bytes, and nothing orders them"),
    "scope": ("8.5, 8.7", "a scope that leaves the other thread out"),
    "relaxed": ("8.8", "a flag that is written or read without release or acquire"),
    "strong-race": (
        "8.8, 8.10",
        "a strong read or write that may come after a later strong write, as what is between orders nothing",
    ),
    "proxy-fence": ("8.6, 9.7.10.28.2", "ordered accesses of two proxies without a proxy fence between"),
    "alias-fence": ("8.6, 8.9.5", "ordered accesses through two addresses without fence.proxy.alias between"),
    "incomplete-copy": (
        "8.9.1.1, 9.7.10.28.2",
        "data of an asynchronous operation whose completion was not observed",
    ),
    "reuse": ("8.9.1.1, 9.7.10.28.6.2", "memory that an asynchronous operation may still read"),
    "tensor-fence": ("9.7.18.6", "tensor memory that passes between threads without tcgen05 fences"),
    "uninitialised-barrier": ("9.7.15.16", "an mbarrier whose initialisation nothing orders before its use"),
}
"""By name: sections of PTX ISA 9.4, and what it means."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A violation.

    Attributes:
        rule: Key of `RULES`.
        first_line, second_line: Lines of the earlier and of the later access.
        text: All about it.
        where: Who did the later access.
    """

    rule: str
    first_line: int
    second_line: int
    text: str
    where: str

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells findings apart."""
        return (self.rule, self.first_line, self.second_line)
