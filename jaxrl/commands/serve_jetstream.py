"""`jaxrl serve --jetstream`: a model behind JetStream's gRPC service, until SIGTERM or Ctrl-C.

The orchestrator is google-jetstream's own; the engine is `jaxrl.rollout.jetstream`. Departures from
`jetstream.core.server_lib`: it listens on the loopback address by default, and needs no Prometheus.
"""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxrl.commands.serve import serving_length
from jaxrl.config.files import load
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.loading import RANDOM, check_vocabulary, config_of, resolve_path
from jaxrl.run.devices import prepare_jax
from jaxrl.run.stop import Stop
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh, platform_of

if TYPE_CHECKING:
    from jaxrl.rollout.jetstream import JetStreamEngine

Say = Callable[[str], None]
_POLL_S = 0.1  # until a signal is noticed
_GRACE_S = 10.0  # for responses that are being drawn when the server is stopped
_MIN_THREADS = 64


def serve(
    model: str, overrides: Sequence[str], address: tuple[str, int], say: Say | None = None, stop: Stop | None = None
) -> None:
    """Serves until a stop is requested. `overrides`: options of the run that says how requests are drawn; `address`:
    host and port, 0 for any free one.

    Raises ValueError where google-jetstream is not installed, for impossible sizes, or an address that cannot be used.
    """
    stop, say = stop or Stop(), say or partial(print, flush=True)
    jetstream = _adapter()
    config = load(None, [f"model.path={model}", *overrides], is_whole=False)  # no rule of training holds
    path = resolve_path(model, "serve --jetstream", weights=True)
    shape = config_of(path)
    check_vocabulary(Tokenizer.from_path(path.removeprefix(RANDOM)), shape, path)
    mesh = make_mesh(prepare_jax(config))
    rollout = config.with_types(platform_of(mesh.devices.flat[0])).rollout
    length = serving_length(config, shape)
    sizes = jetstream.JetStreamConfig(
        num_slots=rollout.max_num_seqs,
        block_size=rollout.block_size,
        max_length=length,
        max_prefill_length=max(each for each in jetstream.PREFILL_LENGTHS if each < length),
        dtype=rollout.dtype,
        seed=config.trainer.seed,
        sampling=replace(config.sampling(()), max_tokens=length, stop_strings=()),
        max_tp=rollout.tp,
    )
    engine = jetstream.JetStreamEngine(shape, Layout(mesh, rollout.tp), sizes, path)
    params = engine.load_params()
    stop.save_first(lambda text: say("stopping: responses under way have ten seconds; a second signal ends it at once"))
    asyncio.run(_serve(jetstream, engine, params, model, address, say, stop))


def _adapter() -> Any:
    """`jaxrl.rollout.jetstream`, without what TensorFlow says as it is imported, and with the logging that was."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import jetstream.core.orchestrator  # pyright: ignore[reportMissingImports]

            from jaxrl.rollout import jetstream
    except ImportError as error:
        raise ValueError(
            f"serve --jetstream needs google-jetstream and grpcio: pip install 'jaxrl[jetstream]' ({error})"
        ) from None
    root.setLevel(level)
    root.handlers = handlers
    return jetstream


async def _serve(
    jetstream: Any,
    engine: JetStreamEngine,
    params: Any,
    model: str,
    address: tuple[str, int],
    say: Say,
    stop: Stop,
) -> None:
    import grpc  # pyright: ignore[reportMissingImports]  (an optional extra)

    threads = ThreadPoolExecutor(max(_MIN_THREADS, engine.max_concurrent_decodes))
    server = grpc.aio.server(threads)
    try:
        port = server.add_insecure_port("{}:{}".format(*address))
    except RuntimeError as error:
        raise ValueError(f"serve --port: {':'.join(map(str, address))} cannot be listened on ({error})") from None
    driver = jetstream.drive(engine, params)
    try:
        jetstream.add_service(driver, server)
        await server.start()
        say(
            f"JetStream serves {model} on {address[0]}:{port}: {engine.max_concurrent_decodes} requests at once, "
            f"prompts up to {engine.config.max_prefill_length} and sequences up to {engine.config.max_length} tokens"
        )
        while not stop.asked:
            await asyncio.sleep(_POLL_S)
    finally:
        await server.stop(_GRACE_S)
        driver.stop()
        threads.shutdown(wait=False)
