# SPDX-License-Identifier: Apache-2.0
"""A model of whole calls, ours and others', for machines that are not at hand."""
