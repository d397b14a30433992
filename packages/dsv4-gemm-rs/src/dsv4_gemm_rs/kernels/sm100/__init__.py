# SPDX-License-Identifier: Apache-2.0
"""The fused kernel for compute capabilities 10.0 and 10.3."""
