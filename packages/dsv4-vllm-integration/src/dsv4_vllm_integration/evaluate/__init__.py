# SPDX-License-Identifier: Apache-2.0
"""Accuracy of two servers on the same questions, paired, with a rule of acceptance that is stated before."""
