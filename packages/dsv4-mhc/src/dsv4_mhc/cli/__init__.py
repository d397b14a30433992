# SPDX-License-Identifier: Apache-2.0
"""The command line `dsv4-mhc`: compile, bench, bench-tiles."""
