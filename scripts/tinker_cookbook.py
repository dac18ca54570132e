"""tinker-cookbook, whose training loops the tests run against this package's own server; run by `make test`, harmless to run again.

One of its requirements, tml-renderers, is not published in the version that it asks for. The cookbook imports it only for models that
need it, and the version that there is serves the rest; so the cookbook is installed without its requirements, and these by name.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

VERSION = "0.6.1"
CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
REQUIREMENTS = """
aiohttp anyio blobfile chz cloudpickle datasets huggingface-hub math-verify numpy pillow pydantic pylatexenc pyrage rich safetensors
sympy termcolor tiktoken tinker tml-renderers torch tqdm transformers
""".split()


def version_of(name: str) -> str | None:
    """Of an installed distribution; None: not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """pip, of this interpreter's environment."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "-c", str(CONSTRAINTS), *arguments]
    return subprocess.run(command, text=True, capture_output=True)


def install() -> str:
    """Install it and what it needs; returns what happened, in one line. Raises SystemExit where pip failed."""
    if version_of("tinker-cookbook") == VERSION and all(map(version_of, REQUIREMENTS)):
        return f"tinker-cookbook {VERSION} is there"
    for arguments in (tuple(REQUIREMENTS), ("--no-deps", f"tinker-cookbook=={VERSION}")):
        done = pip(*arguments)
        if missing := re.search(r"No matching distribution found for (\S+)", done.stderr):
            return f"tinker-cookbook is left out, and so are its tests: the package index has no {missing[1]} for this machine"
        if done.returncode:
            raise SystemExit(f"tinker-cookbook could not be installed:\n{done.stderr}")
    return f"tinker-cookbook {VERSION} is installed"


if __name__ == "__main__":
    print(install())
