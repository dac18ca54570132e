"""Somebody's agent: two tools, as many turns as it takes, and nothing but the openai package."""

import json
import sys

import openai

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "name_of", "description": "What a number means.", "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}}}},
]
RUN = {"add": lambda a, b: str(a + b), "name_of": lambda number: "the answer <|end|>" if number == 42 else "nothing"}


def main():
    row = json.load(sys.stdin)
    client = openai.OpenAI()
    messages = [{"role": "system", "content": "Use your tools."}, {"role": "user", "content": row["question"]}]
    for _ in range(8):
        reply = client.chat.completions.create(model="gpt-x", messages=messages, tools=TOOLS, temperature=0.7, max_tokens=400).choices[0].message
        messages.append(reply)
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": RUN[call.function.name](**json.loads(call.function.arguments))})
    print(json.dumps({"final_answer": reply.content}))


main()
