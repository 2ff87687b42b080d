"""`outrider serve` as shipped: the embedded target and its drafters answer, and agree."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.tools.cli import main
from cluster.tools.serving import default_config
from tests.e2e.live import LiveCluster, free_port, start_cluster

pytestmark = pytest.mark.timeout(290)


@pytest.fixture
def shipped(tmp_path: Path, smollm2_dir: Path) -> Iterator[LiveCluster]:
    """The shipped configuration on another port, with Ray's own token asked for."""
    config = yaml.safe_load(default_config().read_text())
    assert config["verifier"]["target"] == "embedded"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    cluster = start_cluster(config, tmp_path, free_port(), token)
    yield cluster
    if cluster.process.poll() is None:
        assert cluster.stop() == 0


def test_shipped_cluster_says_the_same_whatever_drafts(
    shipped: LiveCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [
        "ngram",
        *(d["name"] for d in yaml.safe_load(default_config().read_text())["drafters"]),
    ]
    question = "Name three rivers, then repeat the three names."
    with shipped.client() as client:
        options = {"temperature": 0.0, "max_tokens": 48, "return_token_ids": True}
        plain = client.chat(question, **options, speculation={"mode": "off"})
        for mode in ("auto", "+".join(names)):
            reply = client.chat(question, **options, speculation={"mode": mode})
            assert reply.token_ids == plain.token_ids
        assert reply.usage.num_accepted > 0
    assert main(["chat", "--url", shipped.url, "--max-tokens", "8", "Hello"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip()
    assert "8 tokens" in captured.err
