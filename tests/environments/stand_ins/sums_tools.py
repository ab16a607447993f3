"""The tools of `sums_tasks`, which the library runs in a process of their own."""

import verifiers.v1 as vf


class Calc(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "calc"

    @vf.tool
    def double(self, x: int) -> str:
        """Doubles."""
        return str(2 * x)


if __name__ == "__main__":
    Calc.run()
