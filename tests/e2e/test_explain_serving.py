"""A cluster that was asked for traces: any reply of its replicas can be explained afterwards."""

import json
from pathlib import Path

import httpx
import pytest

from cluster.tools.cli import main
from protos.errors import OutriderError
from tests.e2e.live import LiveCluster, wait_for
from verifier_service.trace.reading import TraceFolder

pytestmark = pytest.mark.timeout(280)

BODY = {
    "prompt": "once upon a time there was a",
    "max_tokens": 24,
    "temperature": 0.8,
    "seed": 5,
    "ignore_eos": True,
    "return_token_ids": True,
    "speculation": {"mode": "eagle3+ngram", "depth": 3, "width": 2, "nodes": 8},
}


def is_whole(folder: Path, request_id: str) -> bool:
    """True when the request's last record has reached the disk."""
    try:
        stories = TraceFolder(folder).stories(request_id)
    except OutriderError:
        return False
    return bool(stories) and stories[-1].closed is not None


def test_every_choice_of_every_reply_is_explained(
    live: LiveCluster, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = live.log.parent / "traces"
    replies = [
        httpx.post(f"{live.url}/v1/completions", json={**BODY, "n": n}, timeout=120).json()
        for n in (1, 2, 1, 1, 1, 1, 1, 1)
    ]
    for reply in replies:
        for choice in reply["choices"]:
            name = f"{reply['id']}-{choice['index']}"
            wait_for(lambda name=name: is_whole(folder, name), f"{name} is recorded")
        assert main(["explain", reply["id"], "--traces", str(folder), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert [t["ids"] for t in told] == [c["token_ids"] for c in reply["choices"]]
        accepted = sum(d["accepted"] for t in told for d in t["drafters"].values())
        details = reply["usage"]["completion_tokens_details"]
        assert accepted >= details["accepted_prediction_tokens"]
        assert sum(d["drafted"] for t in told for d in t["drafters"].values()) > 0
        assert all(t["target"] and t["settings"]["seed"] for t in told)
    files = TraceFolder(folder).files
    assert all(file.header.writer in file.path.name for file in files)
    assert len({file.header.writer for file in files}) >= 2
    assert (
        main(
            ["explain", replies[1]["id"], "--traces", str(folder), "--tokenizer", str(tiny_target)]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert out.count("where the time went") == 2
    assert "eagle3 tree of" in out
