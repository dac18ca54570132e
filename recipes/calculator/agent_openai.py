"""The same agent written with the openai package alone: a loop around tool calls, and a task a line."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI
from tools import calculate, price

TOOLS = [
    {"type": "function", "function": {"name": "calculate", "description": "Calculate with whole numbers.", "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}},
    {"type": "function", "function": {"name": "price", "description": "What a thing costs.", "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}}},
]
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")  # its connections are shared by all tasks
FUNCTIONS = {"calculate": calculate, "price": price}


def call(name: str, arguments: str) -> str:
    """A tool's result, or what went wrong, for the model to read."""
    try:
        return str(FUNCTIONS[name](**json.loads(arguments)))
    except Exception as e:  # noqa: BLE001 - the model reads what went wrong
        return f"Error: {name} raised {type(e).__name__}: {e}"


def solve(client: OpenAI, question: str) -> str:
    """The answer to one question, in four turns at most."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(4):
        message = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": c.id, "content": call(c.function.name, c.function.arguments)} for c in message.tool_calls]
    return ""


def work(line: str) -> None:
    """One task: its session's address and its row in, the answer out."""
    task = json.loads(line)
    try:
        said = {"final_answer": solve(CLIENT.with_options(base_url=task["base_url"], api_key=task["api_key"]), task["row"]["prompt"])}
    except Exception as e:  # noqa: BLE001 - the rollout fails with it
        said = {"error": f"{type(e).__name__}: {e}"}
    sys.stdout.write(json.dumps({"id": task["id"], **said}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with ThreadPoolExecutor(64) as pool:
        for line in sys.stdin:
            pool.submit(work, line)
