# SPDX-License-Identifier: Apache-2.0
"""Hopper: BF16 multiplication by wgmma, tiles loaded by TMA."""
