# SPDX-License-Identifier: Apache-2.0
"""Test support that the packages' test-suites share; nothing here is used when a kernel runs."""
