# SPDX-License-Identifier: Apache-2.0
"""x."""
from dsv4_symm_mem.protocol.model.explore import *
from dsv4_symm_mem.protocol.model.scenario import *
