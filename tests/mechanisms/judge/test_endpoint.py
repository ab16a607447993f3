"""The judge at an endpoint, against a server on the loopback that misbehaves in every way."""

import base64
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import quote

import pytest
from chat_server import (
    Behaviour,
    ChatServer,
    Handler,
    chat_server,
    closes,
    hangs,
    huge,
    raw,
    raw_status,
    says,
    sends,
    status,
    trickles,
)

from jaxrl.config import from_mapping
from jaxrl.config.domains import domains
from jaxrl.mechanisms.judge import Judge
from jaxrl.mechanisms.judge.endpoint import EndpointJudge, verdict_seed
from jaxrl.rewards.reward_pool import RewardPool
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, RunFailed, Sample, SampleKey

KEY = "sk-very/secret=1"


def pool_of(server: ChatServer, waits: list[float] | None = None, **options: Any) -> RewardPool:
    """It waits for nothing, and notes in `waits` how long it would."""

    async def sleep(seconds: float) -> None:
        if waits is not None:
            waits.append(seconds)

    judge = Judge.Options(endpoint=server.url, endpoint_model="m", max_retries=2)
    reward = {"kind": "judge", "judge": {"endpoint": server.url, "endpoint_model": "m"}}
    pool = RewardPool(domains(from_mapping({"model": {"path": "m"}, "reward": reward}).reward), parts={})
    pool.join("endpoint", EndpointJudge(judge.replace(**options), sleep=sleep))
    return pool


@contextmanager
def judge_at(
    behaviours: Sequence[Behaviour] = (), default: Behaviour | None = None, **options: Any
) -> Iterator[tuple[ChatServer, RewardPool]]:
    with chat_server(behaviours, default) as server, closing(pool_of(server, **options)) as pool:
        yield server, pool


def sample(index: int, text: str = "4") -> tuple[Prompt, Sample]:
    made = Sample.empty(SampleKey(0, index, 0))
    made.text = text
    return Prompt(0, index, (), "2+2?", "sums", "4", {}, "2+2?"), made


def verdicts(pool: RewardPool, count: int = 1) -> list[Verdict]:
    for i in range(count):
        pool.submit(*sample(i))
    came: list[Verdict] = []
    deadline = time.monotonic() + 60
    while pool.num_pending and time.monotonic() < deadline:
        came += pool.wait(1.0)
    return sorted(came, key=lambda verdict: verdict.key)


def test_a_verdict():
    with judge_at([says(None)], max_tokens=9, system_prompt="Be strict.") as (server, pool):
        pool.warm()
        (verdict,) = verdicts(pool)
        assert (verdict.status, verdict.reward, verdict.outside) == ("ok", 0.7, True)
        assert verdict.info == {"judge": ["Score: 7"], "scores": [0.7], "unparsed": 0, "outside": True}
        probe, asked = server.seen
        assert probe["max_tokens"] == 1
        wanted = {"path": "/v1/chat/completions", "model": "m", "max_tokens": 9, "temperature": 0.0, "key": None}
        assert {name: asked[name] for name in wanted} == wanted
        assert "seed" not in asked
        assert [message["role"] for message in asked["messages"]] == ["system", "user"]
        assert pool.take_metrics()["reward/judge/requests"] == 2
        assert pool.take_metrics()["reward/judge/requests"] == 0


@pytest.mark.parametrize(
    ("behaviour", "counted"),
    [(status(500), None), (closes, None), (raw(b"[" * 100_000), "garbled"), (says(None), "garbled")],
)
def test_sent_again_until_it_answers(behaviour: Behaviour, counted: str | None):
    waits = list[float]()
    with judge_at([behaviour, behaviour], waits=waits) as (_, pool):
        (verdict,) = verdicts(pool)
        assert (verdict.status, verdict.reward) == ("ok", 0.7)
        assert [round(wait) for wait in waits] == [1, 2]
        measured = pool.take_metrics()
        assert (measured["reward/judge/requests"], measured["reward/judge/sent_again"]) == (3, 2)
        for name in ("throttled", "garbled", "late"):
            assert measured[f"reward/judge/{name}"] == (2 if name == counted else 0), name


@pytest.mark.parametrize(
    ("behaviour", "wanted", "error", "requests"),
    [
        (status(500, "down"), "crash", "status 500: down", 3),
        (status(400, "too long"), "error", "status 400: too long", 1),
        (status(429, Retry_After="100000"), "crash", "asks to be left alone for 100000 s", 1),
        (huge, "error", "its answer is larger than 4 MiB", 1),
        (says("no idea"), "error", "none of 1 verdicts of the judge holds a score", 1),
    ],
)
def test_what_a_failure_costs(behaviour: Behaviour, wanted: str, error: str, requests: int):
    """The samples at hand, and nothing else: the next one has its verdict."""
    with judge_at(default=behaviour) as (server, pool):
        for verdict in verdicts(pool, 2):
            assert (verdict.status, verdict.reward, verdict.outside) == (wanted, 0.0, True)
            assert error in verdict.info["error"]
        assert len(server.seen) == 2 * requests
        server.default = says("Score: 10")
        (verdict,) = verdicts(pool)
        assert verdict.reward == 1.0


@pytest.mark.parametrize("behaviour", [hangs, trickles])
def test_late(behaviour: Behaviour):
    with judge_at(default=behaviour, request_timeout_s=0.1, max_retries=1) as (_, pool):
        (verdict,) = verdicts(pool)
        assert (verdict.status, verdict.outside) == ("timeout", True)
        assert verdict.info["error"] == "reward.judge.endpoint: no answer within reward.judge.request_timeout_s (0.1 s)"
        assert verdict.info["timeouts"] == {"endpoint": 1}
        assert pool.take_metrics()["reward/judge/late"] == 2


def test_retry_after_holds_all_requests_back():
    waits = list[float]()
    with judge_at([status(429, Retry_After="20")], waits=waits, max_requests=1) as (_, pool):
        assert [verdict.status for verdict in verdicts(pool, 2)] == ["ok", "ok"]
        resent, *held_back = sorted(waits)
        assert resent == 1.0
        assert all(0 < wait <= 20 for wait in held_back)
        assert held_back[-1] > 1.0


def test_several_verdicts_on_a_sample():
    """Each with a seed of its own; one that fails, or holds no score, is left out of the mean and counted."""
    behaviours, waits = [says("Score: 2"), says("?"), status(400), says("Score: 4")], list[float]()
    once = {"max_requests": 1, "requests_per_minute": 2}
    with judge_at(behaviours, num_samples=4, temperature=1.0, waits=waits, **once) as (server, pool):
        (verdict,) = verdicts(pool)
        assert [round(wait, -1) for wait in waits] == [30, 60, 90], "nobody has waited here"
        assert verdict.reward == pytest.approx(0.3)
        assert (verdict.info["unparsed"], verdict.info["failed"]) == (1, 1)
        seeds = [each["seed"] for each in server.seen]
        assert seeds == [verdict_seed(0, SampleKey(0, 0, 0), i) for i in range(4)]
        assert len(set(seeds)) == 4
        assert pool.take_metrics()["reward/judge/unparsed"] == 1


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        (
            status(401, f"bad key {KEY}"),
            "reward.judge.api_key_env (JUDGE_KEY) is refused by {url}: status 401: bad key ***",
        ),
        (status(404), "reward.judge.endpoint ({url}): no chat completions there, or no model 'm': status 404: no"),
        (status(500), "reward.judge.endpoint ({url}): status 500: no"),
        (sends({}), "reward.judge.endpoint ({url}): its answer has no choices[0].message.content"),
    ],
)
def test_refused_at_the_start(behaviour: Behaviour, sentence: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with judge_at(default=behaviour, api_key_env="JUDGE_KEY") as (server, pool):
        with pytest.raises((ValueError, RunFailed)) as refused:
            pool.warm()
        assert str(refused.value) == sentence.format(url=server.url)
        assert {each["key"] for each in server.seen} == {f"Bearer {KEY}"}


@pytest.mark.parametrize(("name", "what"), [("NO_KEY", "is not in the environment"), ("JUDGE_KEY", "holds no key")])
def test_a_variable_must_hold_a_key(name: str, what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", " \n")
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(ValueError, match=f"^reward.judge.api_key_env: the variable '{name}' {what}$"):
        EndpointJudge(Judge.Options(endpoint="http://127.0.0.1:1/v1", api_key_env=name))


def echoes(handler: Handler) -> None:
    """The request's headers, as the judge's words."""
    says(f"Score: 7. You sent {json.dumps(dict(handler.headers.items()))}")(handler)


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        (status(400, f"I saw {KEY}"), "status 400: I saw ***"),
        (status(500, base64.b64encode(KEY.encode()).decode()), "status 500: ***"),
        (raw_status(500, "{" + "".join(f"\\u{ord(each):04x}" for each in KEY)), "status 500: {***"),
        (status(500, "ask http://me:PASS@127.0.0.1/"), "status 500: ask http://***@127.0.0.1/"),
        (echoes, '"Authorization": "Bearer ***"'),
    ],
)
def test_the_key_is_never_recorded(
    behaviour: Behaviour, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    caplog.set_level("DEBUG")
    with judge_at(default=behaviour, api_key_env="JUDGE_KEY") as (_, pool):
        (verdict,) = verdicts(pool)
        said = json.dumps(verdict.info, ensure_ascii=False)
        assert told in verdict.info.get("error", verdict.info.get("judge", [""])[0])
    encoded = base64.b64encode(KEY.encode()).decode()
    for secret in (KEY, encoded[:-4], quote(KEY, safe=""), "PASS", "\\u0073"):
        assert secret not in said
        assert secret not in caplog.text


@pytest.mark.parametrize(
    ("endpoint", "by_proxy"), [("http://127.0.0.1:{port}/v1", False), ("http://judge.invalid/v1", True)]
)
def test_a_proxy_hears_nothing_of_this_machine(endpoint: str, by_proxy: bool, monkeypatch: pytest.MonkeyPatch):
    """The name that does not exist shows that the proxy is otherwise used."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with chat_server() as server, chat_server() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/v1"))
        url = endpoint.format(port=server.server_address[1])
        pool = pool_of(server, endpoint=url, api_key_env="JUDGE_KEY")
        (verdict,) = verdicts(pool)
        pool.close()
    assert verdict.status == "ok"
    assert (len(server.seen), len(proxy.seen)) == ((0, 1) if by_proxy else (1, 0))
