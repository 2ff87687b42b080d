"""Hypothesis strategies for everything that travels."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from protos.exchange import (
    Capabilities,
    ContextAck,
    ContextRows,
    DrafterLoad,
    DraftResult,
    DraftStatus,
    DraftWork,
    Plan,
    PlanKind,
    Projection,
    SessionOpen,
)
from protos.features import DType, FeatureForm, FeatureRows
from protos.generation import (
    FinishReason,
    GenerationRequest,
    RunCounts,
    Speculation,
    SpeculationMode,
    TargetDescription,
    TokenLogprobs,
    TokenRun,
)
from protos.grammar import Grammar, GrammarKind
from protos.limits import Limits
from protos.options import LogitOptions
from protos.params import SEED_MAX, SEED_MIN, Acceptance, SamplingParams
from protos.sparse import SparseQ
from protos.tree import CandidateTree, chain

VOCAB = 50
WIDTH = 3
LIMITS = Limits(
    vocab_size=VOCAB,
    max_context=24,
    max_nodes=12,
    max_depth=6,
    max_width=4,
    max_works=8,
    max_tokens_per_work=24,
    row_widths=(WIDTH,),
    max_piece_bytes=4096,
)

tokens = st.integers(0, VOCAB - 1)
session_ids = st.integers(1, 2**64 - 1)
incarnations = st.integers(0, 2**64 - 1)
texts = st.text(max_size=20)
seconds = st.floats(0, 1e6)
counts = st.integers(0, 2**31 - 1)


def params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        top_k=counts,
        top_p=st.floats(0.001, 1),
        min_p=st.floats(0, 1),
        seed=st.integers(SEED_MIN, SEED_MAX),
        max_tokens=st.integers(1, 2**31 - 1),
        stop_token_ids=st.lists(tokens, max_size=4).map(tuple),
        ignore_eos=st.booleans(),
        acceptance=st.sampled_from(list(Acceptance)),
    )


def plans() -> st.SearchStrategy[Plan]:
    return st.builds(
        Plan,
        kind=st.sampled_from(list(PlanKind)),
        depth=st.integers(1, 6),
        width=st.integers(1, 4),
        nodes=st.integers(1, 12),
    )


@st.composite
def rows(draw: st.DrawFn, end: int = 24, dtype: DType | None = None) -> FeatureRows:
    start = draw(st.integers(0, end - 1))
    count = draw(st.integers(1, min(end - start, 4)))
    kind = dtype or draw(st.sampled_from(list(DType)))
    size = count * WIDTH * kind.num_bytes
    return FeatureRows(start, count, WIDTH, kind, draw(st.binary(min_size=size, max_size=size)))


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12, max_depth: int = 6) -> CandidateTree:
    """Any tree, its scores exact in float16."""
    made: list[tuple[int, int]] = []
    depths = [0]
    for _ in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.sampled_from([n for n, d in enumerate(depths) if d < max_depth]))
        token = draw(tokens)
        if (parent, token) not in made:
            made.append((parent, token))
            depths.append(depths[parent] + 1)
    scores = draw(st.lists(st.floats(-1000, 0, width=16), min_size=len(made), max_size=len(made)))
    return CandidateTree(tuple(t for _, t in made), tuple(p for p, _ in made), tuple(scores))


@st.composite
def sampled_chains(draw: st.DrawFn) -> tuple[CandidateTree, tuple[SparseQ, ...]]:
    """A chain and the q of each of its tokens, weights exact in float16."""
    q: list[SparseQ] = []
    drawn: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        ids = draw(st.lists(tokens, min_size=1, max_size=8, unique=True))
        weight = st.floats(2.0**-24, 1, width=16)
        weights = draw(st.lists(weight, min_size=len(ids), max_size=len(ids)))
        q.append(SparseQ(tuple(ids), tuple(weights)))
        drawn.append(draw(st.sampled_from(ids)))
    return chain(drawn), tuple(q)


@st.composite
def works(draw: st.DrawFn) -> DraftWork:
    base_len = draw(st.integers(2, 24))
    if draw(st.integers(0, 9)) == 0:
        return DraftWork(draw(session_ids), draw(incarnations), base_len, base_len, (), close=True)
    start = draw(st.integers(0, base_len))
    opened = None
    dtype = draw(st.sampled_from(list(DType)))
    if draw(st.booleans()):
        form = draw(st.sampled_from([FeatureForm.RAW, FeatureForm.FUSED]))
        opened = SessionOpen(draw(texts), draw(params()), form, WIDTH, dtype)
    return DraftWork(
        session_id=draw(session_ids),
        incarnation=draw(incarnations),
        base_len=base_len,
        token_start=start,
        tokens=tuple(draw(st.lists(tokens, min_size=base_len - start, max_size=base_len - start))),
        plan=draw(plans()),
        open=opened,
        rows=draw(st.none() | rows(base_len - 1, dtype)),
    )


def _confidences(depth: int) -> st.SearchStrategy[tuple[float, ...]]:
    probabilities = st.floats(0.0, 1.0, width=16)
    return st.lists(probabilities, max_size=depth).map(tuple)


@st.composite
def results(draw: st.DrawFn) -> DraftResult:
    status = draw(st.sampled_from(list(DraftStatus)))
    is_ok = status is DraftStatus.OK
    tree, q = draw(sampled_chains()) if draw(st.booleans()) else (draw(trees()), ())
    return DraftResult(
        session_id=draw(session_ids),
        incarnation=draw(incarnations),
        base_len=draw(st.integers(0, 24)),
        status=status,
        held_tokens=draw(st.integers(0, 24)),
        held_rows=draw(st.integers(0, 24)),
        tree=tree if is_ok else CandidateTree(),
        ranked_ids=tuple(
            tuple(ids) for ids in draw(st.lists(st.lists(tokens, max_size=5), max_size=6))
        ),
        detail=draw(texts),
        q=q if is_ok else (),
        confidences=draw(_confidences(tree.depth)) if is_ok else (),
    )


def pieces() -> st.SearchStrategy[ContextRows]:
    return st.builds(ContextRows, session_ids, incarnations, rows())


def acks() -> st.SearchStrategy[ContextAck]:
    return st.builds(
        ContextAck, session_ids, incarnations, st.integers(0, 24), st.booleans(), texts
    )


def capabilities() -> st.SearchStrategy[Capabilities]:
    projections = st.builds(
        Projection, texts, st.lists(texts, max_size=3).map(tuple), st.floats(0, 1), texts, texts
    )
    return st.builds(
        Capabilities,
        kind=texts,
        name=texts,
        incarnation=incarnations,
        plan_kinds=st.lists(st.sampled_from(list(PlanKind)), max_size=4).map(tuple),
        digest=texts,
        target_digest=texts,
        aux_layers=st.lists(counts, max_size=5).map(tuple),
        raw_width=counts,
        fused_width=counts,
        projection=st.none() | projections,
        vocab_size=counts,
        max_context=counts,
        max_sessions=counts,
        max_depth=counts,
        max_width=counts,
        max_nodes=counts,
        gives_q=st.booleans(),
    )


def loads() -> st.SearchStrategy[DrafterLoad]:
    return st.builds(DrafterLoad, counts, counts, seconds, seconds, counts)


def logit_options() -> st.SearchStrategy[LogitOptions]:
    biases = st.dictionaries(tokens, st.floats(-100, 100), max_size=4)
    return st.builds(
        LogitOptions,
        allowed_token_ids=st.lists(tokens, max_size=4).map(tuple),
        min_tokens=counts,
        logit_bias=biases.map(lambda given: tuple(given.items())),
        repetition_penalty=st.floats(0.01, 100),
        frequency_penalty=st.floats(-2, 2),
        presence_penalty=st.floats(-2, 2),
        grammar=st.none()
        | st.builds(Grammar, st.sampled_from(list(GrammarKind)), st.text(min_size=1, max_size=20)),
    )


def _generation_request(
    params: SamplingParams, options: LogitOptions, **rest: Any
) -> GenerationRequest:
    """A text that has a grammar ends by an EOS."""
    ignore_eos = params.ignore_eos and options.grammar is None
    return GenerationRequest(params=replace(params, ignore_eos=ignore_eos), options=options, **rest)


def generation_requests() -> st.SearchStrategy[GenerationRequest]:
    speculation = st.builds(
        Speculation,
        st.sampled_from(list(SpeculationMode)),
        st.lists(texts, max_size=3).map(tuple),
        st.none() | plans(),
    )
    return st.builds(
        _generation_request,
        request_id=texts,
        prompt_ids=st.lists(tokens, min_size=1, max_size=12).map(tuple),
        params=params(),
        output_ids=st.lists(tokens, max_size=12).map(tuple),
        speculation=speculation,
        options=st.just(LogitOptions()) | logit_options(),
        num_logprobs=st.none() | st.integers(0, 20),
        num_prompt_logprobs=st.none() | st.integers(0, 20),
        timeout_s=st.none() | st.floats(1e-3, 1e5),
    )


def logprobs(most: int, least: int = 0) -> st.SearchStrategy[tuple[TokenLogprobs, ...]]:
    values = st.floats(max_value=0, width=32)
    top = st.lists(st.tuples(tokens, values), max_size=3).map(tuple)
    each = st.builds(TokenLogprobs, values, top)
    return st.lists(each, min_size=least, max_size=most).map(tuple)


@st.composite
def token_runs(draw: st.DrawFn) -> TokenRun:
    ids = tuple(draw(st.lists(tokens, max_size=8)))
    run_counts = st.builds(
        RunCounts,
        num_prompt=counts,
        num_output=counts,
        num_rounds=counts,
        num_draft_rounds=counts,
        num_drafted=counts,
        num_accepted=counts,
        accepted_by_depth=st.lists(counts, max_size=6).map(tuple),
        accepted_by_source=st.lists(st.tuples(texts, counts), max_size=3).map(tuple),
        draft_wait_s=seconds,
        verify_s=seconds,
        queue_s=seconds,
        prefill_s=seconds,
        num_cached=counts,
    )
    return TokenRun(
        request_id="r",
        ids=ids,
        num_accepted=draw(st.integers(0, len(ids))),
        finish_reason=draw(st.none() | st.sampled_from(list(FinishReason))),
        stop_token_id=draw(st.none() | tokens),
        counts=draw(st.none() | run_counts),
        error=draw(texts),
        logprobs=draw(st.just(()) | logprobs(len(ids), len(ids))),
        prompt_logprobs=draw(logprobs(4)),
        is_request_fault=draw(st.booleans()),
    )


def targets() -> st.SearchStrategy[TargetDescription]:
    return st.builds(
        TargetDescription,
        texts,
        texts,
        texts,
        st.booleans(),
        st.integers(VOCAB, 2**20),
        st.integers(1, 2**20),
        st.lists(tokens, max_size=4).map(tuple),
        st.booleans(),
    )
