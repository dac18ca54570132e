"""Models loaded by several threads at once, in a process that has not yet imported transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from nexrl_sdk.engine.model import load_model, load_tokenizer
assert "transformers" not in sys.modules
gate = threading.Barrier(4)
def load(job):
    gate.wait()
    return load_model(sys.argv[1], dtype=job).dtype if job else load_tokenizer(sys.argv[1])
found = list(ThreadPoolExecutor(4).map(load, ["float32", "bfloat16", "float32", None]))
print([str(x) for x in found[:3]])
"""


@pytest.mark.timeout(120)
def test_threads_load_models_of_different_dtypes_at_once(tiny):
    done = subprocess.run([sys.executable, "-c", CODE, str(tiny("qwen2"))], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "['torch.float32', 'torch.bfloat16', 'torch.float32']"
