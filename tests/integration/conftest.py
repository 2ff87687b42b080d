"""Fake drafters and exchange houses that are closed when a test ends."""

import pytest

from tests.integration.exchange_house import VOCAB, House, oracle
from tests.integration.fake_drafter import FakeDrafter


@pytest.fixture
def start():
    """Starts fake drafters and stops them in the end."""
    started = []

    def make(**options):
        port = options.pop("port", 0)
        drafter = FakeDrafter(oracle(), VOCAB, **options).start(port)
        started.append(drafter)
        return drafter

    yield make
    for drafter in started:
        drafter.stop()


@pytest.fixture
def build():
    """Builds houses and closes them in the end."""
    built = []

    def make(*args, **options):
        built.append(House(*args, **options))
        return built[-1]

    yield make
    for house in built:
        house.close()
