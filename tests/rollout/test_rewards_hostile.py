"""Answers that a model may write to hold up, or to slip past, the ready-made rewards: each child process has a limit, and no test reads a clock."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nexrl_sdk.rollout.extract import extract_answer

ENDLESS = 60  # seconds for a child process: far more than linear work takes, far less than quadratic work on these lengths


def child(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=ENDLESS, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


DEGENERATE = {
    "answer is and blanks": "'The answer is' + ' ' * N",
    "answer, many blanks": "('answer' + ' ' * 1000) * (N // 1000)",
    "answer is, marks": "'answer is' + '*_' * (N // 2)",
    "a fraction of a fraction": "'1/' + '1' * N + '/1'",
    "many fractions": "'1/1' * (N // 3)",
    "thousands": "'1' + ',111' * (N // 4) + '1'",
    "points": "'1.' * (N // 2)",
    "signs": "'-1' * (N // 2)",
    "powers": "'1e' * (N // 2)",
    "nested boxes": "r'\\boxed{' * (N // 8) + '}' * (N // 8)",
    "a box of blanks": "r'\\boxed' + ' ' * N",
    "boxes of one": "r'\\boxed a' * (N // 8)",
    "a long box of one": "r'\\boxed ' + 'a' * N + '{'",
    "hashes": "'####' + ' ' * N",
    "many hashes": "'#' * N",
    "lines": "chr(10) * N",
    "tags": "'<answer>' * (N // 8)",
}


@pytest.mark.timeout(120)
def test_no_answer_makes_extraction_take_the_square_of_its_length():
    code = "from nexrl_sdk.rollout.extract import WAYS, extract_answer\n"
    for n in (1_000, 400_000):
        code += f"N = {n}\n" + "".join(f"for way in WAYS: extract_answer({text}, way)\n" for text in DEGENERATE.values())
    found = child(code)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("text", "how", "found"),
    [
        ("3/4/5", "number", "4/5"),
        ("1/2.5", "number", "2.5"),
        ("3/4.", "number", "3/4"),
        ("The answer is:\n5", ("answer", "number"), "5"),
        ("Answer: **7**", "answer", "7"),
        ("the answer is : 7", "answer", "7"),
        ("The answer is   **7.**", "answer", "7"),
        (r"\boxed{1 \boxed{2}} \boxed{\boxed{3} 4}", "boxed", "3"),
    ],
)
def test_what_is_extracted_in_the_corners(text, how, found):
    assert extract_answer(text, how) == found
