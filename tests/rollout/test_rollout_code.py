"""Loading users' files: names, neighbours, edits, mistakes, threads."""

from __future__ import annotations

import inspect
import sys
import threading

import pytest

from nexrl_sdk.rollout.code import find_path, load_module, load_object
from nexrl_sdk.types import ConfigError


def test_two_files_of_the_same_name_and_their_neighbours(tmp_path):
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        (folder / "helper_of_task.py").write_text(f"NAME = {name!r}\n")
        (folder / "task.py").write_text("from helper_of_task import NAME\nfrom .helper_of_task import NAME as RELATIVE\n\ndef name():\n    return NAME + RELATIVE\n")
    path = list(sys.path)
    a, b = (load_object("task.py:name", tmp_path / n) for n in "ab")
    assert (a(), b(), load_object("task.py:name", tmp_path / "a")()) == ("aa", "bb", "aa")
    assert sys.path == path and not list(tmp_path.rglob("__pycache__"))
    assert load_object("task.py:name", tmp_path / "a") is a


def test_edits_of_a_file_and_of_its_neighbour_are_seen(tmp_path):
    (tmp_path / "near.py").write_text("X = 1\n")
    task = tmp_path / "my-task.v2.py"
    task.write_text("import near\n\ndef f():\n    return near.X\n")
    old = load_object(f"{task}:f")
    for x in range(2, 6):  # edits within a second, of the same size: bytecode would be stale
        (tmp_path / "near.py").write_text(f"X = {x}\n")
        assert load_object(f"{task}:f")() == x
    task.write_text("def f():\n    return 70\n")
    new = load_object(f"{task}:f")
    assert new() == 70 and old() == 1 and "70" in inspect.getsource(new)


def test_dataclasses_and_classes_know_their_module(tmp_path):
    (tmp_path / "task.py").write_text("from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n\n@dataclass\nclass A:\n    x: int = 1\n    y: ClassVar[int] = 2\n")
    cls = load_object("task.py:A", tmp_path)
    assert cls().x == 1 and sys.modules[cls.__module__].A is cls


@pytest.mark.parametrize(
    "text,expected",
    [
        ("import no_such_module_here\n", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module_here' (line 1)"),
        ("x = 1\ndef f(:\n", "cannot be imported: SyntaxError"),
        ("import sys\n\nsys.exit(3)\n", "cannot be imported: SystemExit: 3 (line 3)"),
        ("raise ValueError('no key')\n", "cannot be imported: ValueError: no key (line 1)"),
        ("def exakt(row, answer):\n    return 1\n", "task.py defines no 'exact'; did you mean 'exakt'?"),
    ],
)
def test_mistakes_in_the_file(tmp_path, text, expected):
    (tmp_path / "task.py").write_text(text)
    with pytest.raises(ConfigError) as e:
        load_object("task.py:exact", tmp_path)
    assert expected in str(e.value)
    assert not [m for m in sys.modules if m.startswith("nexrl_user_") and m.endswith(".task") and str(tmp_path) in str(getattr(sys.modules[m], "__file__", ""))] or "defines no" in expected
    (tmp_path / "task.py").write_text("def exact(row, answer):\n    return 1\n")
    assert load_object("task.py:exact", tmp_path)(0, 0) == 1


def test_mistakes_in_the_reference(tmp_path):
    (tmp_path / "task.py").write_text("")
    for spec, expected in {
        "tusk.py:f": "tusk.py does not exist; did you mean 'task.py'?",
        "deeper/task.py:f": "nor does its folder",
        "task.py": "must name a file and what it defines",
        ":f": "must name a file",
        "task:f": "module 'task' cannot be imported",
    }.items():
        with pytest.raises(ConfigError, match=expected.replace("?", r"\?")):
            load_object(spec, tmp_path)
    assert load_object("json:dumps")([1]) == "[1]" and load_object(len) is len


def test_many_threads_get_one_module(tmp_path):
    (tmp_path / "task.py").write_text("import time\nTIMES = []\ntime.sleep(0.05)\nTIMES.append(1)\n")
    found = []
    threads = [threading.Thread(target=lambda: found.append(load_module(tmp_path / "task.py"))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 8 and len({id(m) for m in found}) == 1 and found[0].TIMES == [1]


def test_paths_are_tried_beside_the_recipe_and_then_here(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "recipe").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "a.txt").write_text("")
    assert find_path("a.txt", tmp_path / "recipe").resolve() == (tmp_path / "here" / "a.txt").resolve()
    (tmp_path / "recipe" / "a.txt").write_text("")
    assert find_path("a.txt", tmp_path / "recipe") == tmp_path / "recipe" / "a.txt"
    assert find_path("b.txt", tmp_path / "recipe") == tmp_path / "recipe" / "b.txt"
