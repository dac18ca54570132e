"""How the blocks of a page are found, and what is noticed when a page changes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import world as w
from documents import Block, blocks_of

PAGE = """# Top
```python
x = 1
# not a heading
```
## Below `it`
text ``` in a line
~~~
a tree
```
inside
~~~
````yaml
a: |
  ```
  b
````
 ```sh
ls
 ```
"""


def test_fences_kinds_and_headings():
    found = [(b.line, b.heading, b.kind, b.body) for b in blocks_of("page", PAGE)]
    assert found == [(3, "Top", "python", "x = 1\n# not a heading"), (9, "Below `it`", "text", "a tree\n```\ninside"), (14, "Below `it`", "yaml", "a: |\n  ```\n  b"), (19, "Below `it`", "bash", "ls")]
    with pytest.raises(ValueError, match="line 3 has no end"):
        blocks_of("page", "#\n```\nx\n")


def test_any_change_gives_another_key():
    one = Block("page", 3, "Top", "python", "x = 1")
    assert {replace(one, line=9).key} == {one.key} and len({one.key, replace(one, body="x = 2").key, replace(one, heading="Other").key, replace(one, document="other").key}) == 4


def test_signatures_are_held_against_classes():
    class Ours:
        def save(self, path: str, step: int = 0, more: int = 1) -> dict: ...

    assert w.disagreements("def save(self, path: str, step: int = 0) -> dict", Ours) == []
    assert w.disagreements("def save(self, path: str, step: int = 1) -> dict", Ours) == ["save: step=0, documented 1"]
    assert w.disagreements("def load(self)", Ours) == ["Ours has no load"]
    assert "documented ['path', 'at']" in w.disagreements("def save(self, path: str, at: int = 0)", Ours)[0]
    assert list(w.signatures("def a() -> None\ndef b(\n    x: int,\n) -> dict")) == ["a", "b"]


def test_commands_of_a_block():
    body = "# nexrl run\nnexrl -m self-hosted \\\n  -c a.yaml -r  # now\nkubectl get all\npython -m nexrl.main recipe=a\npython -m pytest\n"
    assert w.commands(body) == [["nexrl", "-m", "self-hosted", "-c", "a.yaml", "-r"], ["python", "-m", "nexrl.main", "recipe=a"]]
