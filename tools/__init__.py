# SPDX-License-Identifier: Apache-2.0
"""Checks and descriptions of this repository: for nox, pre-commit, workflows and tests."""
