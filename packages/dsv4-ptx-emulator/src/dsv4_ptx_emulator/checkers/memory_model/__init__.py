# SPDX-License-Identifier: Apache-2.0
"""Happens-before by vector clocks; see `model`."""
