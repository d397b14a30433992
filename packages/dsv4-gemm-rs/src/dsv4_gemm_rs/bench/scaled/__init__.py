# SPDX-License-Identifier: Apache-2.0
"""What SM90 makes of MXFP8 in its FP8 tensor cores, which know no scales: a product to measure by itself."""
