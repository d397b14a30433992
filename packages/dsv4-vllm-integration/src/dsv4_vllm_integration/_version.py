# SPDX-License-Identifier: Apache-2.0
"""The version, read by the build and by `dsv4_vllm_integration.__version__`."""

from __future__ import annotations

__version__ = "0.1.0"
