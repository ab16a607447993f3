"""Environments that come with jaxrl, as a run has them: read from their files, and pickled between turns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jaxrl.config.functions import read_user_file, user_module
from jaxrl.data.tool_calls import ToolCall
from jaxrl.environments import worker
from jaxrl.environments.env import Action, StepResult
from jaxrl.environments.kinds import Episodes, FunctionTools, MethodTools, NativeEpisodes

SHIPPED = Path(worker.__file__).parent / "shipped"
GAMES = {"number_guessing": "NumberGuessing", "wordle": "Wordle", "frozen_lake": "FrozenLake"}


def module(name: str) -> Any:
    if name in ("frozen_lake", "gymnasium"):
        pytest.importorskip("gymnasium")
    if name == "search":
        pytest.importorskip("bm25s")
    return user_module("environment.path", read_user_file("environment.path", str(SHIPPED / f"{name}.py")))


def game(name: str) -> NativeEpisodes:
    return NativeEpisodes(getattr(module(name), GAMES[name]), name)


def called(episodes: Episodes, tool: str, row: dict[str, Any] | None = None, **arguments: Any) -> str:
    action = Action("", (ToolCall(tool, json.dumps(arguments)),))
    (message,) = episodes.step(row or {}, None, action, 20)[0].messages
    return message["content"]


def played(episodes: Episodes, row: dict[str, Any], said: Iterable[str]) -> StepResult:
    state, result = None, StepResult()
    for text in said:
        result, state = episodes.step(row, state, Action(text))
    return result


@pytest.mark.parametrize("name", GAMES)
def test_rows_of_games_differ_and_are_always_the_same(name: str):
    episodes, problem = game(name), module(name).problem
    rows = [problem(i, 3) for i in range(40)]
    assert rows == [problem(i, 3) for i in range(40)]
    (message,) = episodes.first_messages(rows[0])[-1:]
    assert message["role"] == "user"
    step = [episodes.step(row, None, Action("right crane 7"))[0].next_observation for row in rows]
    assert len({str(each) for each in step}) > 1
    assert step == [episodes.step(row, None, Action("right crane 7"))[0].next_observation for row in rows]


def test_number_guessing_is_solved_by_halves():
    episodes, of = game("number_guessing"), module("number_guessing").NumberGuessing
    number = next(str(i) for i in range(1000) if of(str(i)).secret == 15)
    result = played(episodes, {"number": number}, ["I do not know", " 8.", "12"])
    assert (result.next_observation, result.episode_done) == ("Higher.", False)
    assert played(episodes, {"number": number}, ["8", "12", "15"]).metrics == {"solved": 1.0}
    assert played(episodes, {"number": number}, ["99"] * 4).metrics == {"solved": 0.0}


def test_marks_of_wordle():
    marks = module("wordle").marks
    assert marks("crane", "crane") == "GGGGG"
    assert marks("eerie", "where") == "Y-Y-G"
    assert marks("llama", "label") == "GYY--"
    assert marks("tooth", "robot") == "YGY--"


def test_wordle_and_its_end():
    word = module("wordle").Wordle("x").word
    assert played(game("wordle"), {"number": "x"}, ["Hm.", f"Is it {word.upper()}?"]).reward == 1.0
    lost = played(game("wordle"), {"number": "x", "guesses": 2}, ["zzzzz", "zzzzz"])
    assert (lost.reward, lost.episode_done) == (0.0, True)


def test_a_lake_that_is_walked_over():
    episodes, row = game("frozen_lake"), {"number": "0.0", "size": 4, "moves": 6}
    lake = module("frozen_lake").FrozenLake(**row)._env.unwrapped
    cells = [[cell.decode() for cell in line] for line in lake.desc]
    path, seen = {(0, 0): []}, [(0, 0)]
    for i, j in seen:  # the shortest way to each cell
        for word, di, dj in (("left", 0, -1), ("down", 1, 0), ("right", 0, 1), ("up", -1, 0)):
            there = i + di, j + dj
            if there not in path and all(0 <= k < 4 for k in there) and cells[there[0]][there[1]] != "H":
                path[there] = [*path[i, j], word]
                seen.append(there)
    assert played(episodes, row, [f"Go {word}." for word in path[3, 3]]).reward == 1.0
    assert played(episodes, row, ["hm"] * 6) == StepResult(0.0, True, metrics={"no_move": 1.0, "solved": 0.0})
    assert played(episodes, row, ["hm"]).next_observation == "Answer with one of: left, down, right, up."


TAXI = ["south", "north", "east", "west", "pick up", "drop off"]


def gym_game() -> NativeEpisodes:
    return NativeEpisodes(module("gymnasium").Gymnasium, "Gymnasium")


def test_a_taxi_of_gymnasium_is_driven_by_words():
    """A plan for where it stands by its table of transitions, played from pickled states."""
    episodes = gym_game()
    newest = max(name for name in pytest.importorskip("gymnasium").registry if name.startswith("Taxi-"))
    row = {"number": "1.0", "id": newest, "actions": TAXI, "rules": "Drive."}
    taxi = module("gymnasium").Gymnasium(**row)._env.unwrapped
    (message,) = episodes.first_messages(row)
    lines = message["content"].splitlines()
    assert lines[0] == "Drive. Answer with one of: south, north, east, west, pick up, drop off."
    assert message["content"].count("[") == 1, "the taxi"
    assert "(blue)" in message["content"], "the passenger"
    plans, seen, plan = {int(taxi.s): []}, [int(taxi.s)], []
    for state in seen:  # the shortest plan for each
        for number, name in enumerate(TAXI):
            ((_, there, _, over),) = taxi.P[state][number]
            if there not in plans:
                plans[there] = [*plans[state], name]
                seen.append(there)
            if over:
                plan = plan or plans[there]
    said = [f"I will {name.upper()}!" for name in plan]
    state, result, rewards = None, StepResult(), []
    for text in said:
        result, state = episodes.step(row, state, Action(text))
        rewards.append(result.reward)
    assert (rewards, result.episode_done) == ([-1.0] * (len(plan) - 1) + [20.0], True)
    assert played(episodes, row, ["drop off"]).reward == -10.0


def test_observations_without_a_drawing():
    row = {"number": "1.0", "id": "Blackjack-v1", "actions": ["stick", "hit"]}
    (message,) = gym_game().first_messages(row)
    assert re.fullmatch(r"Answer with one of: stick, hit\.\n\[\d+, \d+, [01]\]", message["content"])
    assert played(gym_game(), row, ["stick"]).episode_done
    state, result = None, StepResult()
    while not result.episode_done:
        result, state = gym_game().step(row, state, Action("hit"))
    assert result.reward == -1.0, "over 21"
    plain = {"number": "1.0", "id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "sentence": "Cell {0}."}
    assert played(gym_game(), plain, ["1"]).next_observation == "Cell 4."


def test_the_calculator():
    tools = FunctionTools(module("calculator"), "")
    for expression, answer in (("2**10 - 1,000", "24"), ("6 / 3", "2"), ("-7 // 2", "-4")):
        assert called(tools, "calculate", expression=expression) == answer
    for expression in ("9**9**9", "1 / 0", "__import__('os').getcwd()", "True + 1", "'a' * 3"):
        assert called(tools, "calculate", expression=expression).startswith("Error: "), expression


def test_python_in_the_sandbox():
    tools = FunctionTools(module("python"), "")
    assert called(tools, "python", code="print(sum(range(10)))") == "45\n"
    assert called(tools, "python", code="x = 1") == "(it printed nothing)"
    failed = called(tools, "python", code="print(1)\n1 / 0")
    assert failed.startswith("1\n")
    assert failed.endswith("ZeroDivisionError: division by zero")
    assert "Error: " in called(tools, "python", code="open('/etc/passwd').read()")
    assert called(tools, "python", code="while True: print('x' * 1000)").endswith("it wrote too much")
    module("python")._sandbox.close()


def test_search(tmp_path: Path):
    texts = {"Owls": "An owl hunts mice at night.", "Bees": "Bees make honey in hives.", "Mice": "Mice eat grain."}
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"title": title, "text": text}) + "\n" for title, text in texts.items()))
    tools, row = MethodTools(module("search").Search), {"corpus": str(corpus)}
    assert (
        called(tools, "search", row, query="who makes honey?", num_results=1) == "[1] Bees\nBees make honey in hives."
    )
    assert [line for line in called(tools, "search", row, query="mice").splitlines() if line.startswith("[")] == [
        "[1] Mice",
        "[2] Owls",
    ]
    assert called(tools, "search", row, query="submarine") == "No document has these words."
    other = row | {"text": "title", "title": "text"}
    assert called(tools, "search", other, query="honey") == "[1] Bees make honey in hives.\nBees", "columns by name"
    corpus.with_name("bad.jsonl").write_text('{"title": "x"}\n')
    with pytest.raises(ValueError, match="an object with text under 'text'"):
        called(tools, "search", {"corpus": str(corpus.with_name("bad.jsonl"))}, query="x")
