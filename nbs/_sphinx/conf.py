"""The documentation site: the notebooks as they are, in reading order, with the modules they export."""

import json
from configparser import ConfigParser
from pathlib import Path

ini = ConfigParser(delimiters=["="], interpolation=None)
ini.read(Path(__file__).parents[2] / "settings.ini", encoding="utf-8")
settings = ini["DEFAULT"]

project, author, release = settings["title"], settings["author"], settings["version"]
copyright = settings["copyright"]  # the name that Sphinx reads
extensions = ["myst_nb"]
root_doc = "_sphinx/contents"
exclude_patterns = ["**/.ipynb_checkpoints", "_sphinx/conf.py"]
nb_execution_mode = "off"  # the tests run them
nb_remove_code_outputs = False
myst_enable_extensions = ["dollarmath", "colon_fence"]
suppress_warnings = ["myst.xref_missing", "mystnb.unknown_mime_type", "toc.not_included"]
html_theme = "furo"
html_title = "NexRL"


def colour_cells(app: object, docname: str, source: list[str]) -> None:
    """The cleaned notebooks do not name their language; the reader of them needs it to colour cells."""
    if Path(app.env.doc2path(docname)).suffix == ".ipynb":  # type: ignore[attr-defined]
        notebook = json.loads(source[0])
        for cell in notebook["cells"]:
            cell["source"] = [line for line in cell["source"] if not line.startswith("#|")]  # directives to the exporter
        notebook["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
        source[0] = json.dumps(notebook)


def setup(app: object) -> None:
    """What Sphinx calls."""
    app.connect("source-read", colour_cells)  # type: ignore[attr-defined]
