"""Makes train.jsonl and test.jsonl: small functions to write, two examples to see, and hidden tests to pass.

    python recipes/code/make_data.py

Every expected value is what the reference solution beside the task returns, so a test is right if the solution is. The tasks of test.jsonl are other tasks than
those of train.jsonl, not the same with other numbers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHOWN, HIDDEN = 2, 6  # examples in the prompt, and tests, of each row
HERE = Path(__file__).resolve().parent
WORDS = "amber birch cedar delta ember fjord grove hazel inlet juniper karst lagoon maple noon otter pebble quartz radar stone tidal umber velvet willow level".split()


def number(draw: random.Random) -> int:
    """A small whole number."""
    return draw.randint(-20, 60)


def numbers(draw: random.Random) -> list[int]:
    """Up to eight small whole numbers, some of them twice."""
    return [draw.randint(-9, 20) for _ in range(draw.randint(0, 8))]


def text(draw: random.Random) -> str:
    """Up to four words."""
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(0, 4)))


@dataclass(frozen=True)
class Task:
    """A function to write, for each of several constants `K`."""

    name: str
    parameters: str
    wants: str  # what it returns, with {k} for the constant
    solution: str  # an expression in the parameters and {k}
    draws: tuple[Callable[[random.Random], Any], ...]  # of each parameter
    constants: tuple[Any, ...] = (None,)


TRAIN = [
    Task("sum_multiples", "values", "the sum of those numbers in `values` that are multiples of {k}", "sum(v for v in values if v % {k} == 0)", (numbers,), (2, 3, 4, 5)),
    Task("count_above", "values", "how many numbers in `values` are greater than {k}", "sum(v > {k} for v in values)", (numbers,), (0, 3, 7, 10)),
    Task("clip_all", "values", "`values` as a list in which every number above {k} is replaced by {k}", "[min(v, {k}) for v in values]", (numbers,), (4, 8, 12)),
    Task("take_every", "values", "a list of every {k}th element of `values`, beginning with the first", "values[::{k}]", (numbers,), (2, 3, 4)),
    Task("rotate_left", "values", "`values` rotated to the left by {k} places (an empty list stays empty)", "values[{k} % len(values):] + values[:{k} % len(values)] if values else []", (numbers,), (1, 2, 5)),
    Task("chunks", "values", "`values` cut into lists of {k} elements each, of which the last may be shorter", "[values[i:i + {k}] for i in range(0, len(values), {k})]", (numbers,), (2, 3, 4)),
    Task("running_totals", "values", "a list of the sums of the first 1, 2, 3, ... numbers in `values`", "[sum(values[:i + 1]) for i in range(len(values))]", (numbers,)),
    Task("without_repeats", "values", "`values` without repeated numbers, each where it stood first", "list(dict.fromkeys(values))", (numbers,)),
    Task("largest_gap", "values", "the largest difference of two neighbours in `values` when sorted, or 0 where there are fewer than two", "max((b - a for a, b in zip(sorted(values), sorted(values)[1:])), default=0)", (numbers,)),
    Task("is_rising", "values", "whether every number in `values` is greater than the one before it", "all(a < b for a, b in zip(values, values[1:]))", (numbers,)),
    Task("most_common", "values", "the number that `values` holds most often, the smallest of several, or None for an empty list", "min(values, key=lambda v: (-values.count(v), v), default=None)", (numbers,)),
    Task("common_values", "left, right", "a sorted list of the numbers that are in both `left` and `right`, each once", "sorted(set(left) & set(right))", (numbers, numbers)),
    Task("merge_alternating", "left, right", "a list of the elements of `left` and `right` in turns, beginning with `left`, up to the end of the shorter one", "[v for both in zip(left, right) for v in both]", (numbers, numbers)),
    Task("dot_product", "left, right", "the sum of the products of the elements of `left` and `right` at the same places, up to the end of the shorter one", "sum(a * b for a, b in zip(left, right))", (numbers, numbers)),
    Task("digit_sum", "n", "the sum of the decimal digits of `n`, without its sign, times {k}", "{k} * sum(map(int, str(abs(n))))", (number,), (1, 2, 3)),
    Task("in_base", "n", "`n`, without its sign, written in base {k} as text, without leading zeros", "(lambda f: f(f, abs(n)))(lambda f, m: str(m) if m < {k} else f(f, m // {k}) + str(m % {k}))", (number,), (2, 3, 7)),
    Task("collatz_steps", "n", "how many steps it takes from abs(`n`) + 1 to 1, where an even number is halved and an odd one is tripled and increased by 1", "(lambda f: f(f, abs(n) + 1))(lambda f, m: 0 if m == 1 else 1 + f(f, m // 2 if m % 2 == 0 else 3 * m + 1))", (number,)),
    Task("count_letter", "text", "how often the letter '{k}' is in `text`", "text.count('{k}')", (text,), ("a", "e", "r")),
    Task("longest_word", "text", "the longest word of `text`, the first of several, or '' where it has none", "max(text.split(), key=len, default='')", (text,)),
    Task("reverse_words", "text", "the words of `text` in the opposite order, with a space between two", "' '.join(text.split()[::-1])", (text,)),
    Task("initials", "text", "the first letters of the words of `text`, as capitals and without spaces", "''.join(w[0].upper() for w in text.split())", (text,)),
    Task("word_lengths", "text", "a dictionary from every word of `text` to its length", "{{w: len(w) for w in text.split()}}", (text,)),
    Task("shift_letters", "text", "`text` with every letter from a to z replaced by the one {k} places later in the alphabet, in which a follows z, and all else as it is", "''.join(chr((ord(c) - 97 + {k}) % 26 + 97) if 'a' <= c <= 'z' else c for c in text)", (text,), (1, 3, 13)),
    Task("long_words", "text", "a list of the words of `text` with more than {k} letters, in order", "[w for w in text.split() if len(w) > {k}]", (text,), (4, 5)),
]
TEST = [
    Task("product_of_odd", "values", "the product of the odd numbers in `values`, or 1 where there are none", "__import__('math').prod(v for v in values if v % 2)", (numbers,)),
    Task("pairs_with_sum", "values", "how many pairs of places i < j in `values` have numbers with the sum {k}", "sum(values[i] + values[j] == {k} for j in range(len(values)) for i in range(j))", (numbers,), (5, 10)),
    Task("run_lengths", "values", "a list of tuples (number, how often it stands there in a row), for the runs of equal numbers in `values`", "[(k, len(list(g))) for k, g in __import__('itertools').groupby(values)]", (numbers,)),
    Task("is_palindrome", "text", "whether `text` without its spaces reads the same backwards", "text.replace(' ', '') == text.replace(' ', '')[::-1]", (text,)),
    Task("vowel_words", "text", "how many words of `text` begin with a vowel", "sum(w[0] in 'aeiou' for w in text.split())", (text,)),
    Task("second_largest", "values", "the second largest of the different numbers in `values`, or None where there are fewer than two", "sorted(set(values))[-2] if len(set(values)) > 1 else None", (numbers,)),
    Task("median_low", "values", "the lower median of `values`, or None for an empty list", "sorted(values)[(len(values) - 1) // 2] if values else None", (numbers,)),
    Task("capital_ends", "text", "`text` with the last letter of every word as a capital", "' '.join(w[:-1] + w[-1].upper() for w in text.split())", (text,)),
]


def solution(task: Task, k: Any) -> str:
    """The reference solution's source."""
    return f"def {task.name}({task.parameters}):\n    return {task.solution.format(k=k)}\n"


def rows(tasks: list[Task], seed: int) -> Iterator[dict[str, Any]]:
    """A row for every task and constant."""
    for task in tasks:
        for k in task.constants:
            draw, names = random.Random(f"{seed} {task.name} {k}"), dict[str, Any]()
            exec(solution(task, k), names)  # noqa: S102 - the sources above
            drawn: dict[str, str] = {}
            for _ in range(200):
                args = [f(draw) for f in task.draws]
                drawn.setdefault(f"{task.name}({', '.join(map(repr, args))})", repr(names[task.name](*args)))
            calls = [f"{call} == {value}" for call, value in drawn.items()][: SHOWN + HIDDEN]
            examples = "\n".join(calls[:SHOWN])
            wants = f"Write a Python function `{task.name}({task.parameters})` that returns {task.wants.format(k=k)}."
            yield {"prompt": f"{wants}\n\nExamples:\n{examples}", "tests": [f"assert {c}" for c in calls[SHOWN:]], "entry_point": task.name}


def main() -> None:
    """Write both files."""
    for name, tasks in (("train", TRAIN), ("test", TEST)):
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows(tasks, 0)), encoding="utf-8")


if __name__ == "__main__":
    main()
