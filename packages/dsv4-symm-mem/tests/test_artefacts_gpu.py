# SPDX-License-Identifier: Apache-2.0
"""On a GPU: a kernel from the cache does what the compiled one does, also inside of a captured graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from artefact_worker import build_small
from dsv4_symm_mem.artefacts.store import Origin, Recipe
from dsv4_symm_mem.compiled import Kernel, gpu_arch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_compiled_and_loaded_kernels_do_the_same(tmp_path: Path) -> None:
    arch = gpu_arch(torch.cuda.get_device_capability())
    x = torch.zeros(4, dtype=torch.int32, device="cuda")
    for index, origin in enumerate((Origin.COMPILED, Origin.LOADED, Origin.LOADED)):
        kernel = Kernel(Recipe("small", build_small, ["dsv4_symm_mem"]))
        obtained = kernel.obtain(arch, folder=tmp_path)
        assert obtained is not None
        assert obtained.origin is origin
        kernel(x.data_ptr() + 4 * index, 100 + index, stream=torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel(x.data_ptr() + 12, 200 + index, stream=torch.cuda.current_stream())
        graph.replay()
        assert x[[index, 3]].tolist() == [100 + index, 200 + index]
