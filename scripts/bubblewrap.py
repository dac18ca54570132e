"""Install bubblewrap, which the code sandbox needs, where Debian's package can be installed; say what could not be done, and never fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PACKAGE = "bubblewrap"


def install() -> str | None:
    """Install the package; None where it is there afterwards, else why it is not."""
    if shutil.which("bwrap"):
        return None
    if sys.platform != "linux":
        return f"it is for Linux, and this is {sys.platform}"
    if shutil.which("apt-get") is None:
        return "there is no apt-get here; install it with this system's own package manager"
    if os.geteuid() != 0:
        return f"only root can install packages: sudo apt-get install {PACKAGE}"
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", PACKAGE]):
        try:
            done = subprocess.run(["apt-get", *command], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False)
        except (OSError, subprocess.TimeoutExpired) as e:
            return f"apt-get {command[0]}: {e}"
        if done.returncode and command[0] == "install":
            return f"apt-get install: {(done.stderr.strip() or done.stdout.strip())[-300:]}"
    return None if shutil.which("bwrap") else "the package was installed, and there is still no bwrap"


def main() -> None:
    """Install it, and tell where that failed what will not work."""
    reason = install()
    if reason:
        print(f"bubblewrap was not installed: {reason}. Code as a reward (recipes/code) needs it; its tests will be skipped.")


if __name__ == "__main__":
    main()
