# SPDX-License-Identifier: Apache-2.0
"""The command `dsv4-emulate`."""

from __future__ import annotations
