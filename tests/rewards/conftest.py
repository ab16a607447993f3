"""What the reward tests share: a sandbox for programs, and pools that are closed whatever happens."""

import contextlib
from collections.abc import Iterator

import pytest
from reward_pools import Opened, make

from jaxrl.config.rewards import CodeSection
from jaxrl.rewards.code import CodeScorer
from jaxrl.rewards.reward_pool import RewardPool


@pytest.fixture(scope="module")
def scorer() -> Iterator[CodeScorer]:
    with contextlib.closing(CodeScorer(CodeSection(max_memory_mib=256))) as made:
        made.load()
        yield made


@pytest.fixture
def opened(tmp_path) -> Iterator[Opened]:
    """`reward_pools.make`, with workers that are ready."""
    with contextlib.ExitStack() as stack:

        def made(kind: str = "process", **options) -> RewardPool:
            if kind == "ray":
                pytest.importorskip("ray")
            pool = stack.enter_context(contextlib.closing(make(tmp_path, kind, **options)))
            pool.warm()
            return pool

        yield made
