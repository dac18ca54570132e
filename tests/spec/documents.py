"""The code blocks of NexRL's documents, which lie beside the checkout."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("NEXRL_SPEC") or ROOT.parent / "shared" / "spec")
DOCUMENTS = ("user-guide", "trainers-overview", "custom-trainers", "remote-api-trainers", "training-service")
KINDS = {"python": "python", "py": "python", "yaml": "yaml", "yml": "yaml", "bash": "bash", "sh": "bash", "shell": "bash", "json": "json", "": "text", "text": "text"}


@dataclass(frozen=True)
class Block:
    """One block of code."""

    document: str
    line: int  # of its first line
    heading: str  # the nearest above it
    kind: str  # python, yaml, bash, json or text
    body: str

    @property
    def digest(self) -> str:
        """Changes with its text."""
        return hashlib.sha256(self.body.encode()).hexdigest()[:8]

    @property
    def key(self) -> tuple[str, str, str]:
        """What a table knows it by."""
        return self.document, self.heading, self.digest

    def __str__(self) -> str:
        return f"{self.document}-{self.line}-{self.kind}-{self.digest}"


def blocks_of(document: str, text: str) -> list[Block]:
    """Every fenced block of a page, in order; a fence of another length or inside a block does not end it."""
    found, heading, fence, opened = list[Block](), "", "", (0, "", list[str]())
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"^ {0,3}(`{3,}|~{3,})\s*([\w+-]*)\s*$", line)
        if fence:
            if mark and mark[1].startswith(fence) and not mark[2]:
                first, kind, body = opened
                found.append(Block(document, first, heading, KINDS.get(kind, kind), "\n".join(body)))
                fence = ""
            else:
                opened[2].append(line)
        elif mark:
            fence, opened = mark[1], (number + 1, mark[2].lower(), [])
        elif named := re.match(r"^#{1,6} +(.*?)\s*$", line):
            heading = named[1]
    if fence:
        raise ValueError(f"{document}: the block at line {opened[0]} has no end")
    return found


def documents() -> dict[str, list[Block]]:
    """The blocks of the documents that are there."""
    return {name: blocks_of(name, path.read_text(encoding="utf-8")) for name in DOCUMENTS if (path := FOLDER / f"{name}.md").is_file()}
