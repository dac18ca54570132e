"""The tutorials run in a real kernel, from their own folder, as a reader runs them."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

TUTORIALS = Path(__file__).resolve().parents[2] / "nbs" / "tutorials"


MARKS = {"03_services": (pytest.mark.vllm, pytest.mark.xdist_group("vllm"))}
NEEDS = {"03_services": "vllm", "04_tinker_server": "tinker", "05_agents": "openai"}


@pytest.mark.parametrize("path", [pytest.param(p, marks=MARKS.get(p.stem, ()), id=p.stem) for p in sorted(TUTORIALS.glob("*.ipynb"))])
def test_tutorial(path):
    if needed := NEEDS.get(path.stem):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    nb = nbformat.read(path, as_version=4)
    assert sum(c.cell_type == "code" for c in nb.cells) > 5
    NotebookClient(nb, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
    errors = [o for c in nb.cells if c.cell_type == "code" for o in c.outputs if o.output_type == "error"]
    assert not errors
