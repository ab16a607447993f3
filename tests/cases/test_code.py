"""Responses to problems of public data sets with the rewards that they are to get, each a line of `code.jsonl`.

A row has the data set's columns, `response`, `expect`, and perhaps `options` (which name its columns) and `why` it is
so. All go through the pool that `jaxrl score reward.kind=code` has, one for all rows with the same options.
"""

import json
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from jaxrl.config import from_mapping
from jaxrl.data.responses import read_responses
from jaxrl.rewards.domains import build_scorer, refuse_tests
from jaxrl.rewards.request import ScoreRequest
from jaxrl.rewards.reward_pool import build_pool

ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in Path(__file__).with_name("code.jsonl").read_text("utf-8").splitlines()
]
NOT_COLUMNS = ("id", "expect", "why", "options")


def rewards(options: dict[str, str], rows: list[dict[str, Any]], folder: Path) -> Iterable[tuple[str, str]]:
    """By the row's name, its reward, or why it has none."""
    nested: dict[str, Any] = {"model": {"path": "x"}, "data": {"train_files": ["a.jsonl"]}, "reward": {"kind": "code"}}
    nested["reward"]["code"] = {"max_timeout_s": 20.0}
    for key, value in options.items():
        section, *middle, name = key.split(".")
        (nested[section][middle[0]] if middle else nested[section])[name] = value
    config = from_mapping(nested)
    file = folder / "rows.jsonl"
    columns = ({key: value for key, value in row.items() if key not in NOT_COLUMNS} for row in rows)
    file.write_text("".join(json.dumps(each) + "\n" for each in columns), "utf-8")
    with closing(build_pool(config, build_scorer(config))) as pool:
        for _, prompt, sample in read_responses(file, config.data, lambda _: False, needs_length=False):
            try:
                refuse_tests(config, "the row", ScoreRequest.of(prompt, sample))
            except ValueError as error:
                yield rows[prompt.index]["id"], str(error)
            else:
                pool.submit(prompt, sample)
        while pool.num_pending:
            for verdict in pool.wait(1.0):
                error = "" if verdict.status == "ok" else f" {verdict.status}: {verdict.info.get('error')}"
                yield rows[verdict.key.prompt_index]["id"], f"{verdict.reward:g}{error}"


def test_rewards(tmp_path: Path):
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in ROWS:
        groups.setdefault(json.dumps(row.get("options", {})), []).append(row)
    said = {
        name: what for options, rows in groups.items() for name, what in rewards(json.loads(options), rows, tmp_path)
    }
    wrong = {row["id"]: (said[row["id"]], row.get("why", "")) for row in ROWS if said[row["id"]] != str(row["expect"])}
    assert wrong == {}
