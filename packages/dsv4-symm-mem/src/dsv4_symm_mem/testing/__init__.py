# SPDX-License-Identifier: Apache-2.0
"""Test support that other packages' tests share; part of the wheel, never imported by it."""
