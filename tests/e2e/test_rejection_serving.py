"""`acceptance: rejection` through the front door, a real drafter behind gRPC giving q."""

import time

import httpx

from tests.e2e.live import LiveCluster

BODY = {
    "prompt": "Name three rivers.",
    "max_tokens": 60,
    "temperature": 1.0,
    "seed": 7,
    "ignore_eos": True,
    "acceptance": "rejection",
}


def ask(live: LiveCluster, **fields: object) -> httpx.Response:
    return httpx.post(f"{live.url}/v1/completions", json=BODY | fields, timeout=60)


def test_chains_are_sampled_tested_and_said(live: LiveCluster) -> None:
    end = time.monotonic() + 60
    while (reply := ask(live, speculation={"mode": "eagle3"})).status_code != 200:
        # Until every verifier has met the drafter, nobody could draft for it.
        assert reply.json()["error"]["param"] == "acceptance"
        assert time.monotonic() < end, reply.text
        time.sleep(0.5)
    answer = reply.json()
    assert answer["acceptance"] == "rejection"
    assert answer["usage"]["completion_tokens"] == 60
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    sources = answer["metrics"]["speculative_decoding"]["accepted_by_source"]
    assert set(sources) <= {"eagle3"}


def test_drafters_that_give_no_q_are_refused_by_name(live: LiveCluster) -> None:
    refused = ask(live, speculation={"mode": "scaled"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "acceptance"
    exact = ask(live, acceptance="exact")
    assert exact.status_code == 200
    assert "acceptance" not in exact.json()
