"""`jaxrl serve`: a model, or a run's last checkpoint, behind OpenAI's routes, until SIGTERM or Ctrl-C.

The engine is the rollout's, `jaxrl.serving` handles the requests, and uvicorn speaks HTTP.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl.config import Config
from jaxrl.config.files import load, load_recorded
from jaxrl.config.inputs import reading
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import config_of, resolve_path
from jaxrl.record.progress import StartupProgress
from jaxrl.record.run_dir import CONFIG_FILE
from jaxrl.run.build import LoneWorker
from jaxrl.run.stop import Stop
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.training.steps import whole_step

DEFAULT_LENGTH = 4096
DECODE_STEPS = 4
"""The default steps of a plan: a stream gets a piece after each plan."""
MAX_BODY_BYTES = 16 * 2**20
"""The largest request, which is held in memory."""
_POLL_S = 0.1  # until a signal is noticed


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server listens, and the file of the key that its clients must send, if there is one."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    key_file: str | None = None


def serving_length(config: Config, model: ModelConfig) -> int:
    """Tokens of the longest prompt and response together."""
    return config.serve.max_model_len or min(DEFAULT_LENGTH, model.max_positions)


def serve(
    source: str,
    overrides: Sequence[str] = (),
    address: Address | None = None,
    say: Callable[[str], None] | None = None,
    stop: Stop | None = None,
    *,
    adapters: Sequence[str] = (),
) -> None:
    """Serves a model, or a run's last checkpoint with the run's configuration, until a stop is requested. `adapters`:
    none, or one `NAME=FOLDER`. Raises ValueError for what a user can mend."""
    address, say = address or Address(), say or partial(print, flush=True)
    web = _web()
    key = _key(address)
    with closing(_bound_socket(address)) as listener:
        name, more = _adapter(source, adapters)
        file, checkpoint = Path(source) / CONFIG_FILE, None
        given = [f"rollout.decode_steps={DECODE_STEPS}", *overrides, *more]
        if file.is_file():
            config, checkpoint = load_recorded(file, given, say), whole_step(source, say=say)
        else:
            config = load(None, [f"model.path={source}", *given], say)
        worker, engine = _served(config, checkpoint, say)
        stop = stop or Stop()
        stop.save_first(
            lambda text: say(
                f"stopping: responses under way have {config.serve.grace_s:g} s; a second signal ends it at once"
            )
        )
        asyncio.run(_run(web, name, worker, engine, key, listener, say, stop))


async def _run(
    web: Any,
    name: str,
    worker: LoneWorker,
    engine: Engine,
    key: str | None,
    listener: socket.socket,
    say: Callable[[str], None],
    stop: Stop,
) -> None:
    from jaxrl.serving.app import Routes
    from jaxrl.serving.driver import Driver
    from jaxrl.serving.generation import ServedModel

    config, tokenizer = worker.config, worker.tokenizer
    driver = Driver(engine, config.serve.max_waiting)
    model = ServedModel(driver, tokenizer, config.max_model_length, worker.stop_token_ids, tokenizer.vocab_size)
    app = Routes(model, name, key, MAX_BODY_BYTES).app()

    class Server(web.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are ours: a first one lets responses end

    # clients keep an idle connection for seconds, and would meet its end if the server had as few
    server = Server(web.Config(app, log_level="error", lifespan="off", timeout_keep_alive=75))
    task = asyncio.create_task(server.serve([listener]))
    while not server.started and not task.done():
        await asyncio.sleep(0)
    host, port = listener.getsockname()[:2]
    if task.done():
        await driver.close(0)
        raise ValueError(f"serve --port: {host}:{port} has been taken meanwhile ({task.exception()})")
    say(
        f"serving {name} on http://{f'[{host}]' if ':' in host else host}:{port}/v1: {driver.num_rows} requests "
        f"at once, sequences up to {config.max_model_length} tokens; to chat, open http://{host}:{port}/"
    )
    try:
        while not stop.asked and not task.done() and driver.failure is None:
            await asyncio.sleep(_POLL_S)
    finally:
        began = time.monotonic()
        await driver.close(config.serve.grace_s)
        # readers may be slower than the engine
        server.config.timeout_graceful_shutdown = max(config.serve.grace_s - (time.monotonic() - began), 1.0)
        server.should_exit = True
        await task
    if driver.failure is not None:
        raise driver.failure


def _web() -> Any:
    try:
        import uvicorn  # pyright: ignore[reportMissingImports]

        import jaxrl.serving.app  # noqa: F401
    except ImportError as error:
        raise ValueError(f"serve needs starlette and uvicorn: pip install 'jaxrl[serve]' ({error})") from None
    return uvicorn


def _key(address: Address) -> str | None:
    """The key that clients must send. Raises ValueError where there must be one, and is none."""
    if address.key_file is None:
        if not _is_loopback(address.host):
            raise ValueError(
                f"serve --host: {address.host} is reached from other machines, and anyone there could use the model: "
                "give a key with --api-key-file"
            )
        return None
    file = address.key_file
    with reading(file):
        key = Path(file).read_text(encoding="utf-8").strip()
    if not key or not key.isascii() or any(character.isspace() for character in key):
        raise ValueError(f"serve --api-key-file: {file} must hold one word of ASCII characters, the key")
    return key


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bound_socket(address: Address) -> socket.socket:
    """Bound before the model is read, so that a port in use is refused at once; it listens once the model is there."""
    made: socket.socket | None = None
    try:
        family, kind, number, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, number)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(place)
        return made
    except OSError as error:
        if made is not None:
            made.close()
        raise ValueError(
            f"serve --port: {address.host}:{address.port} cannot be listened on ({error.strerror})"
        ) from None


def _name(source: str) -> str:
    """The model's name for clients: the last part of its path, or its name on the Hub."""
    before, colon, behind = source.partition(":")  # random:..., package:file
    place = behind if colon else before
    return Path(place).resolve().name if colon or os.path.lexists(place) else place


def _adapter(source: str, adapters: Sequence[str]) -> tuple[str, list[str]]:
    """The model's name for clients, and the options that `--adapter` sets."""
    if not adapters:
        return _name(source), []
    if len(adapters) > 1:
        raise ValueError(
            f"serve --adapter: one can be served, found {len(adapters)}: adapters are merged into the weights, and a "
            "second model would need its own engine and KV pool; start a server for each"
        )
    if (Path(source) / CONFIG_FILE).is_file():
        raise ValueError(
            f"serve --adapter: {source} is a run, which has its own weights: give the model that the adapters are for"
        )
    name, _, folder = adapters[0].partition("=")
    if not name or not folder:
        raise ValueError(f"serve --adapter: must be NAME=FOLDER, found {adapters[0]!r}")
    return name, [f"model.lora_adapter_path={folder}"]


def _served(config: Config, checkpoint: Path | None, say: Callable[[str], None]) -> tuple[LoneWorker, Engine]:
    from jaxrl.serving.bodies import MAX_TOP_LOGPROBS

    length = serving_length(config, config_of(resolve_path(config.model.path, weights=True)))
    rollout = config.rollout.replace(stop=[])
    data = config.data.replace(max_prompt_length=length - length // 2, max_response_length=length // 2)
    with closing(StartupProgress(say)) as stages:
        worker = LoneWorker.open(config.replace(rollout=rollout, data=data), say, [checkpoint])
        stages.begin("reading the model")
        executor = worker.ready_executor(checkpoint, truncate=True, top_logprobs=MAX_TOP_LOGPROBS)
        if config.rollout.warmup:
            stages.begin("compiling programs (with rollout.warmup=false as requests need them)")
            executor.warm_up()
        return worker, worker.engine(executor)
