# SPDX-License-Identifier: Apache-2.0
"""What launches did: counters, a table, JSON, and the schedule as a Chrome trace."""

from __future__ import annotations
