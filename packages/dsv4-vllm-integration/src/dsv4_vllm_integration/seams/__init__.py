# SPDX-License-Identifier: Apache-2.0
"""Where vLLM is changed, a feature a module. Importing these imports neither PyTorch nor vLLM."""
