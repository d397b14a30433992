# SPDX-License-Identifier: Apache-2.0
"""State and time: memory spaces, warps, CTAs, clusters, launches, ranks, and the scheduler over them."""
