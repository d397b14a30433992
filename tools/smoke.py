# SPDX-License-Identifier: Apache-2.0
"""Does an installed distribution work at all: `python -I tools/smoke.py NAME VERSION`.

Run by the environment under test, isolated (`-I`), so only what was installed can be imported; therefore it
uses nothing of this repository. Imports every module, kernels included: that needs no GPU and no driver.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import pkgutil
import subprocess
import sys
from pathlib import Path


def main(name: str, version: str) -> None:
    """Raise, or exit with a reason, unless the distribution `name` is `version`, complete and importable."""
    distribution = importlib.metadata.distribution(name)
    if distribution.version != version:
        sys.exit(f"{name} {distribution.version} is installed, {version} was expected")
    top = importlib.import_module(name.replace("-", "_"))
    location = Path(str(importlib.resources.files(top)))
    if Path(sys.prefix).resolve() not in location.resolve().parents:
        sys.exit(f"{name} was imported from {location}, outside the environment under test")
    if not (location / "py.typed").is_file():
        sys.exit(f"{name} has no py.typed")
    modules = [module.name for module in pkgutil.walk_packages(top.__path__, f"{top.__name__}.")]
    for module in modules:
        importlib.import_module(module)
    commands = [script.name for script in distribution.entry_points.select(group="console_scripts")]
    for command in commands:
        program = Path(sys.executable).parent / command
        subprocess.run([program, "--help"], check=True, stdout=subprocess.DEVNULL)
    print(f"{name} {version}: {len(modules) + 1} modules import, {len(commands)} command(s) answer")


if __name__ == "__main__":
    main(*sys.argv[1:])
