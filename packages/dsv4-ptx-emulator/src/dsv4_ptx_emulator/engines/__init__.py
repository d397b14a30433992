# SPDX-License-Identifier: Apache-2.0
"""Asynchronous engines: agents that the scheduler steps among the warps that gave them work."""
