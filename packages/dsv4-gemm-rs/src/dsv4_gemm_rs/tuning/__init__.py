# SPDX-License-Identifier: Apache-2.0
"""Thresholds that a user has measured on their own machine: the file, and how it comes about."""
