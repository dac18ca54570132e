"""Notebooks as the source: text to edit, modules to import, a README to read, cells that test."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import typer

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"
app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


def _run(*cmd: str, **kw) -> int:
    env = dict(os.environ, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return subprocess.run(cmd, cwd=ROOT, env=env, **kw).returncode


def readme_text() -> str:
    """The README: the markdown and code cells of nbs/index.ipynb, without directives."""
    parts = []
    for cell in nbformat.read(NBS / "index.ipynb", as_version=4).cells:
        lines = [x for x in cell.source.splitlines() if not x.startswith("#|")]
        body = "\n".join(lines).strip()
        if body:
            parts.append(body if cell.cell_type == "markdown" else f"```python\n{body}\n```")
    return "\n\n".join(parts) + "\n"


@app.command()
def text(notebook: Path, out: Path = typer.Option(None, "-o", help="the .py file to write; default: beside the notebook, in .nexrl/text")) -> None:
    """Write a notebook as a percent-format Python file, for editing as text."""
    out = out or ROOT / ".nexrl" / "text" / f"{notebook.stem}.py"
    out.parent.mkdir(parents=True, exist_ok=True)
    code = _run("jupytext", "--to", "py:percent", str(notebook), "-o", str(out))
    typer.echo(out) if not code else sys.exit(code)


@app.command()
def nb(source: Path, notebook: Path) -> None:
    """Write an edited percent-format file back into its notebook, and export that one module."""
    update = ["--update"] if notebook.exists() else []
    code = _run("jupytext", *update, "--to", "ipynb", str(source), "-o", str(notebook))
    code = code or _run("nbdev_clean", "--fname", str(notebook))
    if not code:
        export_one(notebook)
    sys.exit(code)


def export_one(notebook: Path) -> None:
    """Export one notebook's module, leaving every other module alone."""
    from nbdev.export import nb_export

    nb_export(str(notebook), lib_path=str(ROOT / "nexrl_sdk"))


@app.command()
def export() -> None:
    """Notebooks to modules, and nbs/index.ipynb to README.md."""
    code = _run("nbdev_export")
    (ROOT / "README.md").write_text(readme_text(), encoding="utf-8")
    sys.exit(code)


@app.command()
def test(workers: int = 2, path: str = typer.Option("", help="one notebook or folder; default: all but the tutorials")) -> None:
    """Run the notebooks' own cells (the tutorials run in a real kernel, from pytest)."""
    target = ["--path", path] if path else []
    env_threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    os.environ.update({k: os.environ.get(k, v) for k, v in env_threads.items()})
    sys.exit(_run("nbdev_test", "--n_workers", str(workers), "--skip_folder_re", "^tutorials$", "--timing", *target))


@app.command()
def check() -> None:
    """Fail where notebooks, modules and README disagree, or a notebook holds outputs or stray metadata."""
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as tmp:
        copy = Path(tmp) / "repo"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "_docs", ".nexrl", "*.egg-info", "__pycache__", ".*_cache"))
        env = dict(os.environ, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        subprocess.run(["nbdev_export"], cwd=copy, env=env, check=True)
        subprocess.run(["nbdev_clean"], cwd=copy, env=env, check=True)
        for kind, pattern in (("module", "nexrl_sdk/**/*.py"), ("notebook", "nbs/**/*.ipynb")):
            made = {p.relative_to(copy) for p in copy.glob(pattern)}
            have = {p.relative_to(ROOT) for p in ROOT.glob(pattern) if ".ipynb_checkpoints" not in p.parts}
            for rel in sorted(made | have):
                if rel not in made or rel not in have or not filecmp.cmp(copy / rel, ROOT / rel, shallow=False):
                    bad.append(f"{rel}: {kind} differs from what its notebook gives; run `make export clean`")
    for path in sorted(NBS.rglob("*.ipynb")):
        for i, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.get("outputs"):
                bad.append(f"{path.relative_to(ROOT)}: cell {i} stores an output; run `make clean`")
    if (ROOT / "README.md").read_text(encoding="utf-8") != readme_text():
        bad.append("README.md: differs from nbs/index.ipynb; run `make export`")
    typer.echo("\n".join(bad) or "notebooks, modules and README agree")
    sys.exit(bool(bad))


@app.command()
def docs() -> None:
    """Build the documentation site into _docs/ (settings in nbs/_sphinx)."""
    code = _run("sphinx-build", "-q", "-b", "html", "-c", "nbs/_sphinx", "nbs", "_docs")
    shutil.rmtree(ROOT / "jupyter_execute", ignore_errors=True)  # where the notebooks were run, beside the site
    sys.exit(code)


if __name__ == "__main__":
    app()
