# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels, one folder per architecture, and their cache."""
