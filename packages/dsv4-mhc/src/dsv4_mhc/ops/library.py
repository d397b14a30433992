# SPDX-License-Identifier: Apache-2.0
"""How an operator is registered: a functional form and one that writes into given outputs.

`torch.ops.dsv4_mhc.NAME` allocates its results. `torch.ops.dsv4_mhc.NAME_out` takes them as trailing
arguments, returns nothing and allocates nothing; it is what a CUDA graph captures. A result that a call does
not have is None for the second form and an empty tensor from the first, because an operator cannot return an
optional tensor.

Rejected: overloads `.out` that return their outputs; torch's functionalisation of user operators handles
mutation only where nothing that is returned aliases an argument.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dsv4_mhc.errors import ArgumentError

LIBRARY = torch.library.Library("dsv4_mhc", "DEF")


class Result(NamedTuple):
    """What an output must be.

    Attributes:
        shape: Its shape.
        dtype: Its dtype; always contiguous.
        zeroed: The operator leaves some elements alone, which are zero where it allocates.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool = False

    def allocate(self, device: torch.device) -> torch.Tensor:
        """A new tensor."""
        make = torch.zeros if self.zeroed else torch.empty
        return make(self.shape, dtype=self.dtype, device=device)


Results = tuple[Result | None, ...]


def define(
    name: str,
    inputs: str,
    outputs: Sequence[str],
    *,
    describe: Callable[..., Results],
    cpu: Callable[..., None],
    cuda: Callable[..., None],
) -> None:
    """Register both forms of an operator.

    Args:
        name: Of the functional form.
        inputs: Their schema; the first is a tensor whose first dimension is T.
        outputs: Names; one that ends in "?" may be absent.
        describe: Raises on unusable inputs, else says what the outputs are, None for those that are absent.
        cpu: Called with inputs and outputs that were checked, if T > 0.
        cuda: The same for CUDA tensors; launches.
    """
    names = [output.removesuffix("?") for output in outputs]
    count = len(names)
    mutable = ", ".join(
        f"Tensor({letter}!){'?' if output.endswith('?') else ''} {output.removesuffix('?')}"
        for letter, output in zip(string.ascii_lowercase, outputs, strict=False)
    )
    results = "Tensor" if count == 1 else f"({', '.join('Tensor' for _ in names)})"
    LIBRARY.define(f"{name}({inputs}) -> {results}")
    LIBRARY.define(f"{name}_out({inputs}, {mutable}) -> ()")

    def allocated(*arguments: Any) -> list[torch.Tensor | None]:
        device = arguments[0].device
        return [None if wanted is None else wanted.allocate(device) for wanted in describe(*arguments)]

    def packed(like: torch.Tensor, outs: Sequence[torch.Tensor | None]) -> Any:
        filled = tuple(like.new_empty(0) if out is None else out for out in outs)
        return filled[0] if count == 1 else filled

    def functional(run: Callable[..., None]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            outs = allocated(*arguments)
            if arguments[0].shape[0]:
                run(*arguments, *outs)
            return packed(arguments[0], outs)

        return call

    def out_form(run: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            ins, outs = arguments[:-count], arguments[-count:]
            for output, found, wanted in zip(names, outs, describe(*ins), strict=True):
                check_output(output, found, wanted, ins)
            if ins[0].shape[0]:
                run(*ins, *outs)

        return call

    for key, run in (("CPU", cpu), ("CUDA", cuda)):
        LIBRARY.impl(name, functional(run), key)
        LIBRARY.impl(f"{name}_out", out_form(run), key)
    fake = lambda *arguments: packed(arguments[0], allocated(*arguments))  # noqa: E731
    torch.library.register_fake(f"dsv4_mhc::{name}", fake, lib=LIBRARY)
    torch.library.register_fake(f"dsv4_mhc::{name}_out", lambda *_: None, lib=LIBRARY)


def check_output(name: str, found: torch.Tensor | None, wanted: Result | None, inputs: Sequence[Any]) -> None:
    """Refuse an output that a call cannot be written into.

    Raises:
        ArgumentError: Present but not wanted or the other way round; another shape, dtype, stride or device;
            or memory that an input has too.
    """
    if found is None or wanted is None:
        if found is not None:
            raise ArgumentError(name, "a tensor", "None: the call does not have it")
        if wanted is not None:
            raise ArgumentError(name, None, f"{wanted.dtype} of shape {wanted.shape}")
        return
    if found.shape != wanted.shape or found.dtype != wanted.dtype or not found.is_contiguous():
        raise ArgumentError(
            name,
            (tuple(found.shape), found.dtype, found.stride()),
            f"contiguous {wanted.dtype} of shape {wanted.shape}",
        )
    if found.device != inputs[0].device:
        raise ArgumentError(f"{name}.device", found.device, str(inputs[0].device))
    start, end = found.data_ptr(), found.data_ptr() + found.nbytes
    for tensor in inputs:
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.data_ptr() < end
            and start < tensor.data_ptr() + tensor.nbytes
        ):
            raise ArgumentError(
                name, "memory of an input", "memory of its own: other threads still read the inputs"
            )


def copy_to(outs: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor | None]) -> None:
    """Write what the CPU path computed into the outputs."""
    for out, value in zip(outs, values, strict=True):
        if out is not None and value is not None:
            out.copy_(value)
