# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk: how they are named, written, trusted, read and loaded."""
