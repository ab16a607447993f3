"""Stands in for `verifiers` below 0.4: as much of it as is driven."""

import json
from typing import ClassVar


class Client:
    def __init__(self, client):
        self.client = client


class Tool:
    name, description = "calc_double", "Doubles."
    parameters: ClassVar = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


class Sums:
    tool_defs: ClassVar = [Tool]

    def __init__(self, count):
        self.count = count

    def get_dataset(self):
        return [
            {
                "prompt": [
                    {"role": "system", "content": "Be short."},
                    {"role": "user", "content": f"What is {i} + {i}?"},
                ],
                "answer": str(2 * i),
            }
            for i in range(self.count)
        ]

    def get_eval_dataset(self):
        return [{"prompt": "What is 50 + 50?", "answer": {"is": 100}}]

    async def run_rollout(self, row, client, model, sampling):
        messages, turns = list(row["prompt"]), 0
        tools = [
            {"type": "function", "function": {"name": each.name, "parameters": each.parameters}}
            for each in self.tool_defs
        ]
        while True:
            answer = await client.client.chat.completions.create(model=model, messages=messages, tools=tools)
            said, turns = answer.choices[0].message, turns + 1
            messages.append(said.model_dump(exclude_none=True))
            if said.content == "fail":
                return {"error": ValueError("the game is broken"), "reward": 0.0}
            if not said.tool_calls:
                return {"reward": float(said.content == row["answer"]), "metrics": {"turns": turns, "note": "x"}}
            for call in said.tool_calls:
                double = str(2 * json.loads(call.function.arguments)["x"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": double})


class SandboxEnv:
    pass


def load_environment(id, count=30):
    if id == "sandboxed":
        return SandboxEnv()
    if id != "sums":
        raise ValueError(f"Could not import '{id}' environment.\nEnsure that it is installed.")
    return Sums(count)
