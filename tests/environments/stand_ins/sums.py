"""An environment for the library itself, below 0.4: sums, with a tool that doubles."""

import verifiers as vf
from datasets import Dataset


def calc_double(x: int) -> str:
    """Doubles.

    Args:
        x: The number.
    """
    return str(2 * x)


def right(completion, answer):
    return float(completion[-1].content == answer)


def load_environment(count=30):
    rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(count)]
    data = Dataset.from_list(rows)
    return vf.ToolEnv(dataset=data, system_prompt="Be short.", tools=[calc_double], rubric=vf.Rubric(funcs=[right]))
