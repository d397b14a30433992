# SPDX-License-Identifier: Apache-2.0
"""The fused kernel for compute capability 9.0."""
