"""An environment for the library itself, 0.4: sums, with a tool that doubles, in a conversation that it opens."""

import verifiers.v1 as vf
from sums_tools import Calc

__all__ = ["SumsEnv", "SumsTaskset"]


class SumData(vf.TaskData):
    answer: str
    asks: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class SumsConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class SumsEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn(task.data.asks)


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    INFINITE = True

    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[vf.Toolset]:
        return [Calc(config.tools)]

    def load(self):
        i = 0
        while True:
            data = SumData(asks=f"What is {i} + {i}?", system_prompt="Be short.", answer=str(2 * i))
            yield SumTask(data, self.config.task)
            i += 1
