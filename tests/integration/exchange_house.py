"""An engine over `HashTarget` with a real draft exchange, and the oracle that a good fake uses."""

import time
from collections.abc import Callable, Sequence

from protos.channel import Security
from protos.exchange import DrafterReplica, Plan, PlanKind
from protos.features import DType, FeatureForm
from protos.generation import GenerationRequest
from protos.params import SamplingParams
from tests.fakes import Client, HashTarget
from verifier_service.engine.draft_form import RowForm, TargetEnd
from verifier_service.engine.drafting import DraftExchange, ExchangeSettings
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import PairExam, RowReader, SourcePlan
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.trace.tracer import Tracer

VOCAB = 97
CONTEXT = 10240
TOKEN = "secret"
CHAIN = Plan(PlanKind.CHAIN, depth=4)
TREE = Plan(PlanKind.TREE, depth=4, width=2, nodes=12)


def oracle() -> Callable[[Sequence[int], int], list[int]]:
    """What a greedy `HashTarget` will say next."""
    target = HashTarget(VOCAB)

    def guess(tokens: Sequence[int], count: int) -> list[int]:
        path = list(tokens)
        for _ in range(count):
            path.append(int(target.path_logits(tuple(path)).argmax()))
        return path[len(tokens) :]

    return guess


class WideRowTarget(HashTarget):
    """Rows of (token, position) repeated up to `width` float32 elements."""

    def __init__(self, width: int) -> None:
        super().__init__(VOCAB, max_context=CONTEXT)
        self._width = width

    def read_rows(self, key, slots):
        narrow = super().read_rows(key, slots)
        repeat = self._width // 2
        return b"".join(narrow[i : i + 8] * repeat for i in range(0, len(narrow), 8))

    def row_width(self, key):
        return self._width


class House:
    """One verifier: engine, exchange, client. `digest` is the tap that its target keeps."""

    def __init__(
        self,
        plans: Sequence[SourcePlan],
        *,
        row_width: int = 2,
        deadline_s: float = 2.0,
        settings: EngineSettings | None = None,
        exchange: ExchangeSettings | None = None,
        read_rows: RowReader | None = None,
        exam: Callable[[WideRowTarget], PairExam] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.target = WideRowTarget(row_width)
        rows = PagedRows(self.target)
        taps = {"digest": RowForm(FeatureForm.RAW, row_width, DType.FP32, "digest")}
        self.exchange = DraftExchange(
            TargetEnd(VOCAB, CONTEXT, "fake", taps),
            read_rows or rows,
            exchange or ExchangeSettings(Security(token=TOKEN)),
            None if exam is None else exam(self.target),
        )
        self.engine = Engine(
            self.target,
            self.exchange,
            StaticPlanner(plans, deadline_s),
            settings
            or EngineSettings(num_slots=CONTEXT, max_prefill_chunk=512, max_draft_wait_s=2.0),
            rows,
            tracer,
        )
        self.client = Client(self.engine)

    def offer(self, source: str, *addresses: str, wait: bool = True) -> None:
        """Name the replicas of a source, and wait until it can be asked."""
        self.exchange.set_replicas(source, [DrafterReplica(address) for address in addresses])
        if wait:
            self.wait_for(source)

    def wait_for(self, source: str) -> None:
        """Until the source can be asked."""
        until(lambda: any(info.name == source for info in self.exchange.sources()))

    def close(self) -> None:
        self.engine.close()


def until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    """Wait for something another thread does; fails when it never happens."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def ask(name: str, length: int = 40, max_tokens: int = 40, **params: object) -> GenerationRequest:
    """A request with a prompt of its own."""
    seed = sum(map(ord, name))
    prompt = tuple((seed + 13 * i) % VOCAB for i in range(length))
    values: dict[str, object] = {"temperature": 0.0, "max_tokens": max_tokens} | params
    return GenerationRequest(name, prompt, SamplingParams(**values))  # type: ignore[arg-type]


def plain_texts(requests: Sequence[GenerationRequest]) -> dict[str, tuple[int, ...]]:
    """What the target says without any drafter."""
    house = House([])
    for request in requests:
        house.client.submit(request)
    texts = house.client.finish()
    house.close()
    return texts


def featured():
    """Capabilities of a drafter that wants rows."""
    return {"raw_width": 2, "digest": "digest"}
