"""An agent of the OpenAI Agents SDK, with a tool, trained as it is: it is asked for sums.

In a Python of its own with `pip install openai-agents`, which need not have jaxrl::

    jaxrl train --config configs/agents_sdk.yaml environment.python=path/to/agents/bin/python

The agent knows nothing of the training. What jaxrl calls is below it: `schemas`, `problem` and `run`.
"""

import random
import re

from agents import (  # pyright: ignore[reportMissingImports]
    Agent,
    ModelBehaviorError,
    OpenAIProvider,
    RunConfig,
    Runner,
    function_tool,
)


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


agent = Agent(
    name="Adder",
    instructions=(
        "You have a tool. To use it, write only "
        '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 34}}</tool_call> with the numbers that you are asked '
        "for. When you are told the result, answer with it alone."
    ),
    tools=[add],
)

schemas = [
    {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.params_json_schema},
    }
    for tool in agent.tools
]


def problem(index, seed):
    """A row: what the agent's first request has, and the answer."""
    draws = random.Random(f"{seed}.{index}")
    a, b = draws.randint(100, 999), draws.randint(100, 999)
    asked = [{"role": "system", "content": agent.instructions}, {"role": "user", "content": f"What is {a} + {b}?"}]
    return {"messages": asked, "answer": str(a + b)}


async def run(row, base_url, api_key):
    """1 for the sum; how often the tool was called is a metric."""
    policy = OpenAIProvider(base_url=base_url, api_key=api_key, use_responses=False)
    config = RunConfig(model="policy", model_provider=policy, tracing_disabled=True)
    try:
        result = await Runner.run(agent, row["messages"][-1]["content"], run_config=config, max_turns=4)
    except ModelBehaviorError:  # it has called what there is not, or with arguments that cannot be read
        return 0.0
    numbers = re.findall(r"\d+", str(result.final_output))
    calls = sum(item.type == "tool_call_item" for item in result.new_items)
    return {"score": float(numbers[-1:] == [row["answer"]]), "calls": calls}
