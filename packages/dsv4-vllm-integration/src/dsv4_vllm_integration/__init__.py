# SPDX-License-Identifier: Apache-2.0
"""A plugin for vLLM: one environment variable a feature, nothing forked, and stock vLLM while none is set.

vLLM finds `plugin.register` through its entry point group and calls it in every process, so importing this
package imports neither PyTorch nor vLLM nor any kernel.
"""

from __future__ import annotations

from dsv4_vllm_integration._version import __version__

__all__ = ["__version__"]
