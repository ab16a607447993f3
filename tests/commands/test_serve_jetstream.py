"""`jaxrl serve --jetstream` as a client meets it: over gRPC, with the tokens that our own engine draws."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.text import TextEngine
from jaxrl.types import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ("a", "The rain in Spain", "2 + 2 = ")
LENGTHS = (9, 3, 17)
CLIENT = """
import asyncio, json, sys
import grpc
from jetstream.core.proto import jetstream_pb2 as pb, jetstream_pb2_grpc

async def ask(client, text, max_tokens):
    content = pb.DecodeRequest.TextContent(text=text)
    ids = []
    async for response in client.Decode(pb.DecodeRequest(text_content=content, max_tokens=max_tokens)):
        ids += response.stream_content.samples[0].token_ids
    return ids

async def main(address, asked):
    async with grpc.aio.insecure_channel(address) as channel:
        client = jetstream_pb2_grpc.OrchestratorStub(channel)
        health = await client.HealthCheck(pb.HealthCheckRequest())
        answers = await asyncio.gather(*(ask(client, text, n) for text, n in asked))
    print(json.dumps([health.is_live, answers]))

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""

needs_jetstream = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("jetstream", "grpc")),
    reason="google-jetstream is not installed: pip install 'jaxrl[jetstream]'",
)


def jaxrl(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "jaxrl", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@needs_jetstream
@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_client_gets_the_tokens_that_our_engine_draws(tiny_model: Path, tp: int, x64):
    model = f"random:{tiny_model}"
    drawn = ("rollout.dtype=float64", f"rollout.tensor_model_parallel_size={tp}", "rollout.temperature=0")
    sizes = ("rollout.max_num_seqs=2", "serve.max_model_len=90")
    with jaxrl("serve", model, "--jetstream", "--port", "0", *drawn, *sizes) as server:
        assert server.stdout is not None
        found = re.search(r" on (127\.0\.0\.1:\d+): (\d+) requests", server.stdout.readline())
        assert found is not None
        assert int(found[2]) == 2 * 4 // tp
        asked = json.dumps(list(zip(PROMPTS, LENGTHS, strict=True)) * 3)  # more than there are slots
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        client = [sys.executable, "-c", CLIENT, found[1], asked]
        done = subprocess.run(client, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        server.send_signal(signal.SIGTERM)
        rest, _ = server.communicate(timeout=60)
        assert server.returncode == 0
        assert "stopping: " in rest
    is_live, answers = json.loads(done.stdout)
    assert is_live
    engine = TextEngine.from_path(model, dtype="float64", max_length=90)
    for (text, length), ids in zip(list(zip(PROMPTS, LENGTHS, strict=True)) * 3, answers, strict=True):
        greedy = SamplingParams(temperature=0, max_tokens=length)
        ((sample,),) = engine.generate([engine.tokenizer.encode(text)], greedy)
        # JetStream keeps the token that ends a response to itself
        assert ids == [token for token in sample.token_ids.tolist() if token not in engine.stop_token_ids]
