"""An environment of Prime Intellect's verifiers 0.4, as a program that asks for turns (`environment.kind=verifiers`):
a taskset, and the agents that solve its tasks.

Runs under the Python that `environment.python` names. One of the environment's agents is the policy. Where neither the
taskset nor `environment.args` names a harness, which is the agent's program, the agent has the one of this file: a
conversation with tools, held in this process.
"""

import itertools
import json
import os
import re
import sys
import threading
import types
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata

if __name__ == "program":  # as program_server.py runs it; the imports below would fail without naming the option
    try:
        _version = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"environment.python: {sys.executable} has no verifiers: install it there, with the environment's package"
        ) from None
    if re.findall(r"\d+", _version)[:2] != ["0", "4"]:
        raise ValueError(f"environment.python: {sys.executable} has verifiers {_version}, and 0.4 is supported")

import openai
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # pyright: ignore[reportMissingImports]

HELD_OUT = 1_000_000_000  # the number of the first held-out row
EVERY = 10  # one of this many tasks is held out
KEY = "JAXRL_POLICY_KEY"  # the variable that verifiers reads the policy's key from
HARNESS = "jaxrl_conversation"
_loaded = {}


async def schemas(id, args):
    """The tools of the first task, as its harness gives them."""
    environment = await _environment(id, args, False)
    asked = await environment.first_request(environment.task(0, False))
    return asked.get("tools") or []


async def problem(index, seed, id, args):
    environment = await _environment(id, args, index >= HELD_OUT)
    task = environment.task(index % HELD_OUT, index >= HELD_OUT)
    answer = getattr(task.data, "answer", None)
    return {
        "number": index,
        "answer": answer if isinstance(answer, str) else None,
        "messages": await environment.messages(task),
        "task": task.data.model_dump(mode="json"),
    }


async def run(row, base_url, api_key, id, args):
    """An episode, scored by the task and the environment."""
    environment = await _environment(id, args, row["number"] >= HELD_OUT)
    episode = await environment.episode(environment.task_of(row["task"]), base_url, api_key)
    if not episode.ok:
        raise RuntimeError(_failure(episode))
    (trace,) = (trace for trace in episode.traces if trace.agent.name == environment.seat)
    numbers = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    numbers |= {name: value for name, value in trace.metrics.items() if value is not None}
    return {**numbers, "score": trace.reward}


async def _environment(id, args, held_out):
    """The environment for training, or the one that `args["eval"]` changes; it stays for the life of this process."""
    own = {name: value for name, value in args.items() if name != "eval"}
    changed = args.get("eval") if held_out else None
    given = _merged(own, changed) if changed else own
    key = json.dumps([id, given], sort_keys=True)
    if key not in _loaded:
        _loaded[key] = Environment(id, given, is_held_out_whole=bool(changed))
        await _loaded[key].start()
    return _loaded[key]


def _merged(own, changed):
    both = {
        name: _merged(own[name], changed[name]) for name in own.keys() & changed.keys() if isinstance(own[name], dict)
    }
    return own | changed | both


def _config(id, args):
    try:
        return vf.resolve_env_config({**args, "taskset": {**args.get("taskset", {}), "id": id}})
    except ModuleNotFoundError as error:
        raise ValueError(f"environment.id: {id} cannot be imported: {error.__cause__ or error}") from None
    except ValueError as error:
        details = getattr(error, "errors", list)()  # pydantic's, in several lines
        wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in details] or [str(error)]
        raise ValueError(f"environment.args: {'; '.join(wrong)}") from None


def _failure(episode):
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode has failed, and does not say why"


class Environment:
    """An environment, with the policy in one of its seats. `args`: its configuration, as in the section `env` of
    verifiers' own files. `is_held_out_whole`: all tasks are for evaluation."""

    def __init__(self, id, args, is_held_out_whole):
        config = _config(id, args)
        seats = {name: agent for name, agent in config if isinstance(agent, vf.AgentConfig) and agent.client is None}
        if len(seats) != 1:
            raise ValueError(
                f"environment.id: an episode of {id} has the agents {', '.join(seats) or 'none'} to be the policy, and "
                "a trajectory is one of them: environment.args gives the others a client and a model of their own"
            )
        ((self.seat, agent),) = seats.items()
        self._is_own_harness = agent.harness is None and vf.default_harness_id(id) == "bash"
        changes = {"harness": vf.HarnessConfig(id=HARNESS)} if self._is_own_harness else {}
        if agent.runtime == vf.PrimeConfig() and "runtime" not in args.get(self.seat, {}):
            changes["runtime"] = vf.SubprocessConfig()
        config = config.model_copy(update={self.seat: agent.model_copy(update=changes)})
        self._env = vf.load_environment(config)
        self._is_held_out_whole = is_held_out_whole
        taskset = self._env.taskset
        self._tasks, self._left = [], iter(taskset)
        if taskset.bounded:
            self._tasks, self._left = list(self._left), None
            if not self._tasks:
                raise ValueError(f"environment.id: the taskset {id} has no tasks")
        self._resources = AsyncExitStack()

    async def start(self):
        self._env._shared_tools = await self._resources.enter_async_context(self._env.shared_tools())
        await self._env.start()

    def task(self, number, held_out):
        """The training task of a number, or the held-out one: every tenth, from the tenth on."""
        if self._is_held_out_whole:
            place = number
        else:
            place = number * EVERY + EVERY - 1 if held_out else number + number // (EVERY - 1)
        if self._left is not None:
            self._tasks.extend(itertools.islice(self._left, max(0, place + 1 - len(self._tasks))))
        if place < len(self._tasks):
            return self._tasks[place]
        places = range(len(self._tasks))
        own = [each for each in places if self._is_held_out_whole or (each % EVERY == EVERY - 1) == held_out] or places
        return self._tasks[own[number % len(own)]]

    def task_of(self, data):
        """A task that has been in a row: another process may have made it."""
        first = self.task(0, held_out=False)
        return type(first)(type(first.data).model_validate(data), self._env.config.taskset.task)

    async def messages(self, task):
        if self._is_own_harness and task.data.prompt is not None:
            return first_messages(task.data.system_prompt, task.data.prompt)
        return (await self.first_request(task))["messages"]

    async def first_request(self, task):
        """Plays the task until the policy is asked."""
        with Recorder() as recorder:
            episode = await self.episode(task, recorder.base_url, "none")
        if recorder.request is None:
            raise ValueError(f"environment.id: an episode fails before its first turn: {_failure(episode)}")
        return recorder.request

    async def episode(self, task, base_url, api_key):
        os.environ[KEY] = api_key
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=KEY)
        return await self._env.run_episode(task, vf.ModelContext(model="policy", client=client))


class ConversationHarness(vf.Harness[vf.HarnessConfig]):
    """A harness that is not a separate program: it asks the model, calls the tools that it names, and asks again."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = first_messages(*self.resolve_prompt(data))
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
            await stack.enter_async_context(client)
            tools, names, connections = await connect_mcp({"mcpServers": servers}, stack)
            given = {"tools": tools} if tools else {}
            while True:
                try:
                    answer = await client.chat.completions.create(model=ctx.model, messages=messages, **given)
                except openai.APIStatusError as error:  # the episode has ended, or the policy's server refuses
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=str(error))
                said = answer.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if not said.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in said.tool_calls:
                    content = await self._answer(call.function, names, connections)
                    name = call.function.name
                    messages.append({"role": "tool", "tool_call_id": call.id, "name": name, "content": content})

    async def _answer(self, call, names, connections):
        if call.name not in names:
            return f"Error: there is no tool {call.name}"
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError as error:
            return f"Error: the arguments are not JSON: {error}"
        if not isinstance(arguments, dict):
            return "Error: the arguments must be an object"
        return await call_mcp(connections, names, call.name, arguments)


# verifiers imports a harness by the name of its module
sys.modules[HARNESS] = types.ModuleType(HARNESS)
sys.modules[HARNESS].__dict__.update(ConversationHarness=ConversationHarness, __all__=["ConversationHarness"])


def first_messages(system, prompt):
    """A system prompt and a prompt, as OpenAI's API takes them."""
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(message_to_wire, prompt or ())]
    return [*([{"role": "system", "content": system}] if system else []), *asked]


class Recorder:
    """A server in the policy's place, which keeps the first request and refuses it."""

    def __init__(self):
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                recorder.request = recorder.request or body
                self.send_error(400)

            def log_message(self, format, *args):
                pass

        self.request = None
        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()
