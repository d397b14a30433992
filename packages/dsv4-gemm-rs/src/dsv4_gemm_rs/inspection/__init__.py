# SPDX-License-Identifier: Apache-2.0
"""What can be known of a compiled kernel without running it."""
