# SPDX-License-Identifier: Apache-2.0
"""How a kernel gets in: compiled host functions of the CuTe DSL on emulated devices, on host memory."""

from __future__ import annotations
