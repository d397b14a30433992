# SPDX-License-Identifier: Apache-2.0
"""Encodings that bits in registers and memory have: narrow floats, swizzles, matrix descriptors, tensor maps.

Pure functions of bits, free of machine state, so that each can be tested against a table or another library.
"""
