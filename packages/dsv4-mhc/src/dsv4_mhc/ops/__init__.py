# SPDX-License-Identifier: Apache-2.0
"""The operators, one a file: checks, the torch operator, a CPU path and the launch.

Importing this package registers `torch.ops.dsv4_mhc.*`. It imports no TileLang.
"""
