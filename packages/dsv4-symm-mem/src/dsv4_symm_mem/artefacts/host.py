# SPDX-License-Identifier: Apache-2.0
"""From a compiled function to an object file and back, by the DSL's own means: no linker, no C compiler.

Contract: `export` turns what `cute.compile` returned into an object file; `load` makes a callable of such a
file, and differs from the function that was exported in nothing that a caller sees. Neither needs a GPU: the
machine code goes to a device at the first launch.

Found out with DSL 4.8.1. `export_to_c` of a TVM-FFI function writes a relocatable object, cubin included,
also for an architecture that is not there. `cute.runtime.load_module` hands it to the LLVM linker inside of
the DSL, which resolves it against the DSL's runtime library: milliseconds for each, and none of the DSL's
compiler runs. It does import the DSL's Python package, about half a second.

Rejected: linking shared objects, which `tvm_ffi.load_module` takes without the DSL (somebody has to link
them, a server rarely has a linker, and a second kind of file would have to be tested); the C interface of the
runtime library (`CuteDSLRT_Module_Create_From_Bytes` loads the object without Python, but hands out functions
of the DSL's other calling convention only, which costs several times as long to call through ctypes);
loading the DSL's extension module without its package (two copies of it in a process that uses the DSL too).

Trap: the DSL compiles host functions for the CPU of the machine that it runs on, AVX and all. What is made on
one machine might then end on another with an illegal instruction. So every function is marked with the oldest
CPU that is worth supporting before it is exported; launching a kernel gains nothing from a newer one.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

SYMBOL = "kernel"
BASELINES = {"x86_64": ("x86-64-v2", "+sse4.2"), "aarch64": ("generic", "+neon")}
"""CPU and features that LLVM compiles host functions for, by machine."""


def export(function: Any, path: Path) -> None:
    """Write a compiled function as an object file.

    Args:
        function: What `cute.compile` made with `--enable-tvm-ffi`; stays as callable as it was.
        path: The file; its name ends in `.o`.

    Raises:
        Exception: Whatever the DSL raises, on another version perhaps AttributeError.
    """
    from cutlass._mlir import ir

    cpu, features = BASELINES[platform.machine()]

    def mark(op: Any) -> Any:
        if op.name == "llvm.func":
            op.attributes["target_cpu"] = ir.StringAttr.get(cpu)
            op.attributes["target_features"] = ir.Attribute.parse(f'#llvm.target_features<["{features}"]>')
        return ir.WalkResult.ADVANCE

    with function.ir_module.context:
        function.ir_module.operation.walk(mark)
    function.export_to_c(str(path), SYMBOL, export_only_tvm_ffi_symbols=True)


def load(path: Path) -> Callable[..., Any]:
    """The function in an object file that `export` wrote.

    Raises:
        Exception: Whatever the DSL raises for a file that it cannot read or link.
    """
    from cutlass.cute.runtime import load_module

    function: Callable[..., Any] = getattr(load_module(str(path), enable_tvm_ffi=True), SYMBOL)
    return function
