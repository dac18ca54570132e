"""tinker-cookbook, whose training loops the tests run against this package's own server; run by `make test`, harmless to run again.

One of its requirements, tml-renderers, is not published in the version that it asks for. The cookbook imports it only for models that
need it, and the version that there is serves the rest; so the cookbook is installed without its requirements, and these by name.
"""

from __future__ import annotations

import importlib.metadata
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


def pip(*arguments: str) -> None:
    """pip, of this interpreter's environment; raises SystemExit with its words where it failed."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "-c", str(CONSTRAINTS), *arguments]
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"tinker-cookbook could not be installed:\n{done.stderr}")


def install() -> str:
    """Install it and what it needs; returns what happened, in one line."""
    if version_of("tinker-cookbook") == VERSION and all(map(version_of, REQUIREMENTS)):
        return f"tinker-cookbook {VERSION} is there"
    pip(*REQUIREMENTS)
    pip("--no-deps", f"tinker-cookbook=={VERSION}")
    return f"tinker-cookbook {VERSION} is installed"


if __name__ == "__main__":
    print(install())
