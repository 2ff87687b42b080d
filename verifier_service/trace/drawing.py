"""A story as text for people: every round's tree, what was accepted, where the milliseconds went.

Pure: lines out of values. Knows no tokenizer; whoever draws says how a token is called.

    > accepted    + the target's own next token    - agreed with, but behind the end of the text
"""

import time
from collections.abc import Callable, Iterator, Sequence

from protos.exchange import Plan, PlanKind
from verifier_service.trace.records import Chunk, Preempted, Round, StepFacts
from verifier_service.trace.story import Pace, SourceSum, Story, pace, plain_s, sources, spent

TokenName = Callable[[int], str]
_NUM_SLOWEST = 3
LEGEND = (
    "trees: > accepted, + the target's own next token, - agreed with but behind the end of the text"
)


def heading(story: Story) -> Iterator[str]:
    """Who asked for what, and how it ended."""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(story.header.time_of(story.began_s)))
    yield f"request {story.request_id}, {when}"
    header = story.header
    yield f"  verifier {header.writer}: {header.target}, fingerprint {header.fingerprint[:16]}"
    opened, closed = story.opened, story.closed
    if opened is None:
        yield "  its beginning is in a file that was removed"
    else:
        resumed = f" and {opened.num_output} of output" if opened.num_output else ""
        asked = ", ".join(f"{name} {value}" for name, value in opened.settings)
        prompt = _count(opened.num_prompt, "prompt token")
        yield f"  {prompt}{resumed}; {asked}; speculation {opened.mode}"
    if story.num_missing:
        yield f"  not recorded: {_count(story.num_missing, 'round')}"
    if closed is None:
        so_far = _count(len(story.ids), "token")
        yield f"  {so_far} so far: it runs, or its verifier was killed"
    else:
        counts = closed.counts
        error = f" ({closed.error})" if closed.error else ""
        tokens, rounds = _count(counts.num_output, "token"), _count(counts.num_rounds, "round")
        yield f"  {tokens} in {rounds}, ended: {closed.reason}{error}"


def draw_parts(story: Story, name: TokenName, first: int, last: int) -> Iterator[str]:
    """Rounds `first` to `last` and what lies between them."""
    shown = 0
    is_planned = story.opened is None or story.opened.mode == "auto"
    for part in story.parts:
        number = part.number if isinstance(part, Round) else shown
        shown = number
        if not first <= max(number, 1) <= last:
            continue
        yield ""
        match part:
            case Chunk():
                yield _chunk_line(part)
            case Preempted():
                yield f"preempted with {part.base_len} tokens: its pages were needed"
            case Round():
                yield from draw_round(part, name, is_planned=is_planned)


def draw_round(part: Round, name: TokenName, *, is_planned: bool = True) -> Iterator[str]:
    """One round. is_planned: its drafts were the planner's choice, who may have said why."""
    step, tree = part.step, part.tree
    drafted = f"{len(part.nodes)} of {tree.num_nodes} drafted accepted, " if tree.num_nodes else ""
    yield (
        f"round {part.number}: {part.base_len} tokens known, {drafted}"
        f"{part.num_committed} committed in {_ms(step.step_s)} ms"
    )
    if part.is_prompt:
        yield f"  computed  {_range(part.start, part.num_rows, part.num_cached)}"
    asked = [a for a in part.asked if a.plan.kind is not PlanKind.NONE]
    if asked or (step.why and is_planned):
        planner = f"  (planner: {_why(step)})" if step.why and is_planned else ""
        told = "; ".join(f"{a.source} {_plan(a.plan)}" for a in asked) or "nobody"
        yield f"  asked     {told}{planner}"
    replies = [
        f"{d.source} {d.num_nodes} nodes in {_ms(d.latency_s)} ms"
        + (f" ({_ms(d.drafter_s)} in the drafter)" if d.drafter_s else "")
        + (", to an older question" if d.was_late else "")
        for d in part.drafted
    ]
    answered = {d.source for d in part.drafted}
    silent = [f"{a.source} nothing" for a in asked if a.source not in answered]
    if replies or silent:
        yield f"  answered  {'; '.join([*replies, *silent])}"
    yield from draw_tree(part, name)
    yield f"  times     {_times(step)}"


def draw_tree(part: Round, name: TokenName) -> Iterator[str]:
    """The verified tree, depth first; the target's own token stands before what it did not say."""
    children = part.tree.children()
    depth_of = {node: depth for depth, node in enumerate(part.nodes, 1)}
    end = part.nodes[-1] if part.nodes else 0
    stack = [(0, 0)]
    while stack:
        node, depth = stack.pop()
        if node:
            told = f"{', '.join(part.sources[node - 1])} {part.tree.scores[node - 1]:.2f}"
            mark = " "
            if node in depth_of:
                mark = ">" if depth_of[node] <= part.num_committed else "-"
            yield f"    {mark} {'  ' * (depth - 1)}{name(part.tree.tokens[node - 1])}  {told}"
        if node == end and len(part.choices) > len(part.nodes):
            mark = "+" if part.num_committed > len(part.nodes) else "-"
            yield f"    {mark} {'  ' * depth}{name(part.choices[len(part.nodes)])}"
        below = sorted(children[node].values(), key=lambda n: (n not in depth_of, n))
        stack.extend((child, depth + 1) for child in reversed(below))


def draw_sums(story: Story) -> Iterator[str]:
    """Where the milliseconds went, what a token took, what each drafter brought."""
    where = spent(story)
    rows = (
        ("in the queue", where.queue_s),
        ("prompt", where.prompt_s),
        ("waiting for drafts", where.wait_s),
        ("verification: forward", where.forward_s),
        ("verification: choices", where.choose_s),
        ("rest of its steps", where.rest_s),
        ("outside its steps", where.elsewhere_s),
    )
    yield f"{'where the time went':26}{'ms':>10}{'share':>8}"
    for what, took_s in rows:
        yield f"  {what:24}{_ms(took_s):>10}{_share(took_s, where.total_s):>8}"
    yield f"  {'in all':24}{_ms(where.total_s):>10}"
    yield from _round_lines([part for part in story.rounds if not part.is_prompt])
    yield ""
    yield from _pace_lines(story, pace(story, drafted=True), pace(story, drafted=False))
    sums = sources(story)
    if sums:
        yield ""
        yield (
            f"{'drafters':14}{'asked':>7}{'replies':>9}{'late':>6}{'drafted':>9}{'accepted':>10}"
            f"{'share':>8}{'reply ms':>10}{'drafting':>10}"
        )
        yield from map(_source_line, sums)


def _round_lines(rounds: Sequence[Round]) -> Iterator[str]:
    """Which rounds to look at, and how much company they had."""
    if not rounds:
        return
    slowest = sorted(rounds, key=lambda part: -part.step.step_s)[:_NUM_SLOWEST]
    told = ", ".join(f"{part.number} ({_ms(part.step.step_s)})" for part in slowest)
    yield f"  slowest rounds: {told}"
    others = [part.step.num_requests - 1 for part in rounds]
    mean = sum(others) / len(others)
    yield f"  other requests in its steps: {mean:.1f} on average, {max(others)} at most"


def _pace_lines(story: Story, drafted: Pace, plain: Pace) -> Iterator[str]:
    for told, each in (("with drafts", drafted), ("without", plain)):
        if each.num_rounds:
            yield (
                f"rounds {told:12} {each.num_rounds:5}, {each.num_tokens / each.num_rounds:.2f} "
                f"tokens each, {_ms(each.token_s)} ms of step a token"
            )
    if drafted.num_rounds and plain.num_rounds and drafted.token_s:
        yield f"a token with drafts came {plain.token_s / drafted.token_s:.2f} times as fast"
    model_s = plain_s(story)
    if model_s is not None:
        yield f"the planner thinks that a step without drafts verifies in {_ms(model_s)} ms"


def _source_line(each: SourceSum) -> str:
    return (
        f"  {each.source:12}{each.num_asked:7}{each.num_replies:9}{each.num_late:6}"
        f"{each.drafted:9}{each.accepted:10}{_share(each.accepted, each.drafted):>8}"
        f"{_ms(each.latency_s):>10}{_ms(each.drafter_s):>10}"
    )


def _chunk_line(part: Chunk) -> str:
    told = _range(part.start, part.num_rows, part.num_cached)
    return f"prompt: {told} in {_ms(part.step.step_s)} ms; {_times(part.step)}"


def _range(start: int, num_rows: int, num_cached: int) -> str:
    cached = f", {num_cached} were cached" if num_cached and start == num_cached else ""
    return f"tokens {start} to {start + num_rows - 1}{cached}"


def _plan(plan: Plan) -> str:
    if plan.kind is PlanKind.CHAIN:
        return f"chain of {plan.depth}"
    width = f", {plan.width} wide" if plan.kind is PlanKind.TREE else ""
    nodes = f" of {plan.nodes} nodes" if plan.nodes else ""
    return f"{plan.kind.value}{nodes}, {plan.depth} deep{width}"


def _why(step: StepFacts) -> str:
    # Labels of planning/options: names of who is waited for, depth, shape.
    why = "look-ups only" if step.why.startswith("depth0/") else step.why
    return f"{why}, {step.expected:.1f} tokens expected" if step.expected else why


def _times(step: StepFacts) -> str:
    parts: Sequence[tuple[str, float]] = (
        ("wait", step.wait_s),
        ("forward", step.forward_s),
        ("choices", step.choose_s),
        ("rest", step.rest_s),
    )
    told = ", ".join(f"{what} {_ms(took_s)}" for what, took_s in parts)
    requests, rows = _count(step.num_requests, "request"), _count(step.num_rows, "row")
    return f"{told} ms; {requests} and {rows} in the step"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _ms(took_s: float) -> str:
    return f"{1000.0 * took_s:.1f}"


def _share(part: float, whole: float) -> str:
    return f"{100.0 * part / whole:.0f} %" if whole else "-"
