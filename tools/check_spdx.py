# SPDX-License-Identifier: Apache-2.0
"""Every file says its licence in its first line, in its own kind of comment.

Run as `python -m tools.check_spdx [files]`; without files, on everything that git does not ignore. A kind
of file that this table does not know is an error, so that a new kind is decided on once.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.workspace import ROOT

TAG = "SPDX-License-Identifier: Apache-2.0"
HASH = f"# {TAG}"
MARKUP = f"<!-- {TAG} -->"
FIRST_LINE = {
    ".c": f"/* {TAG} */",
    ".cfg": HASH,
    ".css": f"/* {TAG} */",
    ".md": MARKUP,
    ".py": HASH,
    ".pyi": HASH,
    ".sh": HASH,
    ".svg": MARKUP,
    ".toml": HASH,
    ".txt": HASH,
    ".yaml": HASH,
    ".yml": HASH,
    "": HASH,
}
WITHOUT_COMMENTS = {".csv", ".json", ".npz", ".png", ".ptx", ".typed"}
UNMARKED_NAMES = {"LICENSE", "py.typed"}


def complaint(path: Path) -> str | None:
    """What is wrong with the file's first line, or None."""
    suffix = "" if path.name.startswith(".") and path.suffix == path.name else path.suffix
    if path.name in UNMARKED_NAMES or suffix in WITHOUT_COMMENTS:
        return None
    if suffix not in FIRST_LINE:
        return f"{path}: tools/check_spdx.py does not know files that end in {suffix!r}"
    with path.open(encoding="utf-8") as file:
        line = file.readline()
        if line.startswith("#!"):
            line = file.readline()
    expected = FIRST_LINE[suffix]
    return None if line.rstrip("\n") == expected else f"{path}: the first line is not {expected!r}"


def repository_files() -> list[Path]:
    """All files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [ROOT / name for name in listing.split("\0") if name]
    return [path for path in paths if path.is_file()]


def main(arguments: Sequence[str]) -> int:
    """Print one line per offending file; 1 if there is any."""
    paths = [Path(name) for name in arguments] or repository_files()
    complaints = [text for path in paths if (text := complaint(path)) is not None]
    for text in complaints:
        print(text)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
