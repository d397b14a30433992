# SPDX-License-Identifier: Apache-2.0
"""The benchmark: cases, timing, report and plot, each apart."""
