# SPDX-License-Identifier: Apache-2.0
"""Stand-alone collectives with the same result, to the bit, as the fused operations."""
