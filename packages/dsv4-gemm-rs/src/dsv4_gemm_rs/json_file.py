# SPDX-License-Identifier: Apache-2.0
"""JSON files that others may read while they are written: results, reports, thresholds."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_json(path: Path, held: Any) -> None:
    """Write `held` to `path` whole or not at all, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(held, file, indent=1)
            file.write("\n")
        # mkstemp makes the file private; a result is meant to be read.
        Path(temporary).chmod(0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
