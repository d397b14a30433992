# SPDX-License-Identifier: Apache-2.0
"""Mutation testing of compiled kernels: weaken one synchronisation at a time, and see who notices."""
