# SPDX-License-Identifier: Apache-2.0
"""The package's version, read by the build and at run time."""

__version__ = "0.1.0"
