# SPDX-License-Identifier: Apache-2.0
"""PTX text to instructions: lexer, parser, and the model of a module. Knows no semantics."""
