# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: CUDA graphs, medians, cold and warm L2, against the bytes that a perfect kernel moves."""
