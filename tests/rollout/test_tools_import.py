"""What it costs to make the first tool of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
from nexrl_sdk.rollout.tools import Tool, import_jsonschema
tool = Tool("f", "", {"properties": {"a": {"type": "integer"}}, "required": ["a"]}, lambda a: a + 1)
assert tool.call({"a": 1}).text == "2" and "required property" in tool.call({}).error
assert "rfc3987_syntax" not in sys.modules and "lark" not in sys.modules
checker = import_jsonschema().Draft202012Validator.FORMAT_CHECKER
if "iri" in checker.checkers:
    assert checker.conforms("http://example.org/\\u00e9", "iri") and not checker.conforms("not one", "iri") and "rfc3987_syntax" in sys.modules
"""


@pytest.mark.timeout(120)
def test_a_tool_does_not_wait_for_the_grammars_of_formats_that_nobody_checks() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert not done.returncode, done.stderr
