"""HTTP in, tokens out, on a real local Ray: one text whatever drafts, a service that lives on."""

import asyncio
import contextlib
import os
import random
import signal
import threading
from contextlib import aclosing

import httpx
import openai
import pytest

from cluster.tools.calls import Reply, Retries
from cluster.tools.client import AsyncOutriderClient
from protos.errors import InvalidRequest, UnknownModel
from tests.e2e.live import LiveCluster, wait_for

pytestmark = pytest.mark.timeout(280)

PROMPT = "once upon a time there was a"
MODES = [
    {"mode": "off"},
    {"mode": "auto"},
    {"mode": "ngram", "depth": 8},
    {"mode": "eagle3", "depth": 4},
    {"mode": "eagle3", "depth": 3, "width": 4, "nodes": 12},
    {"mode": "eagle3+ngram", "depth": 3, "width": 4, "nodes": 16},
    {"mode": "here", "depth": 3, "width": 4, "nodes": 12},
    {"mode": "scaled", "depth": 4},
]


def sampled(temperature: float, max_tokens: int = 80) -> dict:
    return {
        "temperature": temperature,
        "seed": 11,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def at_once(live: LiveCluster, prompts: list[str], options: dict) -> list[Reply]:
    """Their replies, all asked for at the same time."""

    async def go() -> list[Reply]:
        async with AsyncOutriderClient(live.url) as client:
            return await asyncio.gather(*(client.complete(p, **options) for p in prompts))

    return asyncio.run(go())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_same_text_with_any_drafter(live: LiveCluster, temperature: float) -> None:
    options = sampled(temperature)
    with live.client() as client:
        plain = client.complete(PROMPT, **options, speculation={"mode": "off"})
        assert plain.usage.num_accepted + plain.usage.num_rejected == 0
        assert len(set(plain.token_ids)) >= 20
        for mode in MODES:
            drafted = client.complete(PROMPT, **options, speculation=mode)
            assert drafted.token_ids == plain.token_ids, mode
            assert drafted.text == plain.text
            assert drafted.fingerprint == plain.fingerprint
            if mode["mode"].startswith(("eagle3", "here")):
                assert drafted.usage.num_accepted + drafted.usage.num_rejected > 0


def test_stream_equals_reply(live: LiveCluster) -> None:
    with live.client() as client:
        whole = client.chat("tell me", **sampled(0.9))
        chunks = list(client.stream_chat("tell me", **sampled(0.9)))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    ids = tuple(i for chunk in chunks for i in chunk.token_ids)
    assert ids == whole.token_ids
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.num_output == whole.usage.num_output == 80


def test_requests_in_parallel_are_as_if_alone(live: LiveCluster) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(8)]

    with live.client() as client:
        alone = [client.complete(p, **sampled(0.7, 40)).text for p in prompts]
    assert [reply.text for reply in at_once(live, prompts, sampled(0.7, 40))] == alone


def test_stop_string_is_cut_wherever_it_falls(live: LiveCluster) -> None:
    options = sampled(0.0)
    with live.client() as client:
        text = client.complete(PROMPT, **options).text
        at = len(text) // 2
        stop = text[at : at + 2]
        for mode in ("off", "eagle3+ngram"):
            override = {"mode": mode}
            reply = client.complete(PROMPT, **options, stop=stop, speculation=override)
            assert reply.text == text[: text.index(stop)]
            assert (reply.finish_reason, reply.stop_reason) == ("stop", stop)
            assert len(reply.token_ids) == reply.usage.num_output


def test_official_client_chats_and_streams(live: LiveCluster) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        asked = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hello"}],
            "temperature": 0.5,
            "seed": 4,
            "max_tokens": 30,
        }
        whole = client.chat.completions.create(**asked)
        assert whole.usage is not None
        assert whole.system_fingerprint
        stream = client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        told = chunks[-1].usage
        assert told is not None
        # What drafts brought may differ between two runs; the text's tokens may not.
        assert told.prompt_tokens == whole.usage.prompt_tokens
        assert told.completion_tokens == whole.usage.completion_tokens
        assert told.completion_tokens_details is not None
        named = client.chat.completions.with_raw_response.create(
            **asked, extra_headers={"X-Request-Id": "mine-1"}
        )
        assert named.headers.get_list("x-request-id") == ["mine-1"]
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**(asked | {"model": "nope"}))
        several = client.chat.completions.create(**(asked | {"n": 3}))
        assert [choice.index for choice in several.choices] == [0, 1, 2]
        assert several.choices[0].message.content == text
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**(asked | {"logit_bias": {"999999": 1}}))
        assert caught.value.param == "logit_bias"


def test_bad_input_leaves_the_service_alive(live: LiveCluster) -> None:
    before = live.replicas("ingress") | live.replicas("verifier")
    bodies: list[tuple[bytes, int]] = [
        (b"{", 400),
        (b'{"prompt": "\\ud83d"}', 400),
        (b'{"prompt": "x", "temperature": 9}', 400),
        (b'{"prompt": [384]}', 400),
        (b'{"prompt": "' + b"word " * 4000 + b'"}', 400),
        (b'{"prompt": "x", "model": "nope"}', 404),
        (b'{"prompt": "' + b"x" * (5 << 20) + b'"}', 413),
    ]
    with httpx.Client(base_url=live.url, timeout=60) as http:
        for body, status in bodies:
            reply = http.post("/v1/completions", content=body)
            assert reply.status_code == status, body[:60]
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
            assert not any(leak in reply.text for leak in ("Traceback", "/work", ".py", "ray."))
        endless = (b"x" * 65536 for _ in range(1600))
        assert http.post("/v1/completions", content=endless).status_code == 413
        assert http.get("/v1/chat/completions").status_code == 405
        assert http.get("/nope").status_code == 404
        assert http.get("/ping").json()["status"] == "ok"
        assert "/tokenize" in http.get("/openapi.json").json()["paths"]
        ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == PROMPT
    with live.client() as client:
        with pytest.raises(UnknownModel):
            client.chat("x", model="nope")
        with pytest.raises(InvalidRequest):
            client.chat("x", speculation={"mode": "nope"})
        assert client.complete("x", max_tokens=3).usage.num_output <= 3
    assert before == live.replicas("ingress") | live.replicas("verifier")


def test_a_client_that_leaves_frees_its_request(live: LiveCluster) -> None:
    running = "outrider_verifier_num_running"
    wait_for(lambda: live.statistic(running) == 0, "nothing runs")
    with live.client() as client:
        streams = [
            client.stream(PROMPT, max_tokens=1900, ignore_eos=True, temperature=1.0)
            for _ in range(3)
        ]
        for stream in streams:
            next(stream)
        assert live.statistic(running) == 3
        for stream in streams:
            stream.close()
        wait_for(lambda: live.statistic(running) == 0, "the requests are gone", 15)
        used = live.statistic("outrider_verifier_num_pages") - live.statistic(
            "outrider_verifier_num_free_pages"
        )
        assert used == 0
        assert client.complete("x", max_tokens=2).usage.num_output <= 2


def test_a_client_that_stops_waiting_frees_its_request(live: LiveCluster) -> None:
    running = "outrider_verifier_num_running"
    wait_for(lambda: live.statistic(running) == 0, "nothing runs")
    body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True}
    with httpx.Client(base_url=live.url) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=0.3)
    wait_for(lambda: live.statistic(running) == 0, "the request is gone", 15)


def test_a_storm_of_cut_streams_leaves_nothing_behind(live: LiveCluster) -> None:
    processes = live.replicas("ingress") | live.replicas("verifier")
    chance = random.Random(0)

    async def cut(client: AsyncOutriderClient, number: int, room: asyncio.Semaphore) -> None:
        async with room:
            stream = client.stream(
                f"{PROMPT} {number}",
                max_tokens=1500,
                ignore_eos=True,
                speculation={"mode": chance.choice(["auto", "off", "eagle3"])},
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(chance.uniform(0.0, 0.3)), aclosing(stream):
                    async for _ in stream:
                        pass

    async def go() -> None:
        room = asyncio.Semaphore(30)
        async with AsyncOutriderClient(live.url) as client:
            await asyncio.gather(*(cut(client, number, room) for number in range(150)))

    with live.client() as client:
        before = client.complete(PROMPT, **sampled(0.0))
        asyncio.run(go())
        wait_for(lambda: live.statistic("outrider_verifier_num_running") == 0, "rest", 60)
        wait_for(lambda: live.statistic("outrider_verifier_num_waiting") == 0, "rest", 60)
        wait_for(lambda: live.statistics()["outrider_verifier_num_draft_sessions"] == 0, "rest", 60)
        for gauge in ("num_pages", "num_free_pages"):
            assert live.statistic(f"outrider_verifier_{gauge}") == 2 * (8192 // 16)
        assert live.statistic('vllm:num_requests_running{model_name="tiny"}') == 0
        assert client.complete(PROMPT, **sampled(0.0)).token_ids == before.token_ids
    assert processes == live.replicas("ingress") | live.replicas("verifier")


def test_a_killed_drafter_changes_no_text_and_drafting_resumes(live: LiveCluster) -> None:
    options = sampled(0.6, 600) | {"speculation": {"mode": "eagle3", "depth": 3}}
    plain = sampled(0.6, 600) | {"speculation": {"mode": "off"}}
    drafted = 'outrider_verifier_drafted_total{source="eagle3"}'
    with live.client() as client:
        expected = [client.complete(f"{PROMPT} {n}", **plain).token_ids for n in range(2)]
        found: dict[int, tuple[int, ...]] = {}

        def run(number: int) -> None:
            with live.client() as own:
                found[number] = own.complete(f"{PROMPT} {number}", **options).token_ids

        before = live.statistic(drafted)
        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: live.statistic(drafted) > before + 20, "drafting has begun", 30)
        (victim,) = live.replicas("drafter-eagle3")
        os.kill(victim, signal.SIGKILL)
        for thread in threads:
            thread.join(timeout=120)
        assert [found[number] for number in range(2)] == expected
        wait_for(
            lambda: live.replicas("drafter-eagle3") not in (set(), {victim}), "a new replica", 60
        )

        def resumed() -> bool:
            reply = client.complete(PROMPT, **(options | {"max_tokens": 20}))
            return reply.usage.num_accepted + reply.usage.num_rejected > 0

        wait_for(resumed, "drafting resumes", 60)


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL], ids=["hangs", "dies"])
def test_a_verifier_that_goes_changes_no_text(live: LiveCluster, blow: signal.Signals) -> None:
    options = sampled(0.6, 1200)
    prompts = [f"{PROMPT} {number}" for number in range(4)]

    async def go() -> list[tuple[int, ...]]:
        async with AsyncOutriderClient(live.url, retries=Retries(most=0)) as client:
            tasks = [asyncio.create_task(client.complete(p, **options)) for p in prompts]
            while live.statistic("outrider_verifier_num_running") < len(prompts):
                await asyncio.sleep(0.05)
            victims.append(await asyncio.to_thread(live.busiest, "verifier"))
            os.kill(victims[0], blow)
            return [reply.token_ids for reply in await asyncio.gather(*tasks)]

    victims: list[int] = []
    before = live.replicas("verifier")
    assert len(before) == 2
    failovers = live.statistic("outrider_failovers_total")
    try:
        broken = asyncio.run(go())
        # Once per request at most: none goes back to the one it lost.
        assert 0 < live.statistic("outrider_failovers_total") - failovers <= len(prompts)
        assert broken == [reply.token_ids for reply in at_once(live, prompts, options)]
    finally:
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                # Serve itself takes minutes to give up one that hangs.
                os.kill(victim, signal.SIGKILL)
        # Whatever was found here, the next test finds two.
        wait_for(lambda: len(live.replicas("verifier") - set(victims)) == 2, "a new verifier", 120)
        wait_for(lambda: live.statistic("outrider_verifier_replicas") == 2, "both serve", 120)


def test_drafters_scale_with_sessions_and_back(live: LiveCluster) -> None:
    replicas = 'outrider_drafter_replicas{drafter="scaled"}'
    wait_for(lambda: live.statistic(replicas) == 1, "one replica at rest", 90)
    stop = threading.Event()
    errors: list[Exception] = []

    def load(number: int) -> None:
        with live.client() as client:
            while not stop.is_set():
                try:
                    client.complete(
                        f"{PROMPT} {number}",
                        max_tokens=1500,
                        ignore_eos=True,
                        speculation={"mode": "scaled", "depth": 2},
                    )
                except Exception as error:
                    errors.append(error)
                    return

    threads = [threading.Thread(target=load, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: live.statistic(replicas) == 2, "a second replica under load", 90)
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=120)
    assert errors == []
    wait_for(lambda: live.statistic(replicas) == 1, "one replica again", 90)


def test_overload_is_refused_with_a_time_to_come_back(live: LiveCluster) -> None:
    async def go() -> list[int]:
        async with httpx.AsyncClient(base_url=live.url, timeout=120) as http:
            body = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}
            replies = await asyncio.gather(
                *(http.post("/v1/completions", json=body) for _ in range(90))
            )
            for reply in replies:
                if reply.status_code == 503:
                    assert int(reply.headers["retry-after"]) >= 1
                    assert reply.json()["error"]["code"] == "overloaded"
            return [reply.status_code for reply in replies]

    statuses = asyncio.run(go())
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 64
    with live.client() as client:
        assert client.complete("x", max_tokens=2).finish_reason in ("length", "stop")
