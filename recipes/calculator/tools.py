"""What the agent can call: a calculator, and a price list."""

from __future__ import annotations

import ast
import functools
import operator
import random
import re

CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}
LARGEST = 10**12  # of any number on the way


@functools.cache
def price_list() -> dict[str, int]:
    """Things with names of three letters, and what each costs: a number of three digits."""
    draw = random.Random(20264)
    names = [a + v + b for a in CONSONANTS for v in VOWELS for b in CONSONANTS]
    draw.shuffle(names)
    return {name: draw.randrange(100, 1000) for name in names}


def price(item: str) -> int:
    """What a thing costs.

    Args:
        item: its name
    """
    prices = price_list()
    if item not in prices:
        raise ValueError("no such item")
    return prices[item]


def calculate(expression: str) -> int:
    """Calculate with whole numbers.

    Args:
        expression: numbers, + - * // % and brackets, as in 12*(3+4)
    """
    if not re.fullmatch(r"[0-9+*/%() -]{1,200}", expression):
        raise ValueError("no numbers")
    try:
        return value_of(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError) as e:
        raise ValueError("no value") from e


def value_of(node: ast.expr) -> int:
    """The value of a syntax tree that holds numbers and operations only."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        found = -value_of(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        found = OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    else:
        raise ValueError("no value")
    if abs(found) > LARGEST:
        raise ValueError("too large")
    return found
