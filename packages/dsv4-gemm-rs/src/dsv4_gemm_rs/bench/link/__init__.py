# SPDX-License-Identifier: Apache-2.0
"""What the link between two GPUs can do, measured with the instructions that the exchange is made of."""
