# SPDX-License-Identifier: Apache-2.0
"""Two builds of a server compared under load: the same requests, both arms on every node, arms swapped.

`plan` says what to run, `servers` and `client` run it and save JSON, `arithmetic` turns saved JSON into
figures, `report` prints and draws them. Reports need nothing but the saved files.
"""
