"""A story as plain values for machines: what `drawing` says, with times in milliseconds.

Pure. Knows no tokenizer: token ids only.
"""

from protos.exchange import Plan
from verifier_service.trace.records import Chunk, Preempted, Round, StepFacts
from verifier_service.trace.story import Part, Story, pace, plain_s, sources, spent

Json = dict[str, object]


def story_json(story: Story) -> Json:
    """Everything that is known of a request's stay."""
    header, opened, closed = story.header, story.opened, story.closed
    told: Json = {
        "request": story.request_id,
        "began_s": header.time_of(story.began_s),
        "verifier": header.writer,
        "target": header.target,
        "target_digest": header.digest,
        "system_fingerprint": header.fingerprint,
        "reason": closed.reason if closed else None,
        "error": closed.error if closed else "",
        "ids": list(story.ids),
        "missing_rounds": story.num_missing,
        "parts": [_part(part) for part in story.parts],
    }
    if opened is not None:
        told |= {
            "num_prompt": opened.num_prompt,
            "num_output_given": opened.num_output,
            "settings": dict(opened.settings),
            "speculation": opened.mode,
        }
    return told | _sums(story)


def _sums(story: Story) -> Json:
    where = spent(story)
    names = ("queue", "prompt", "wait", "forward", "choose", "rest", "elsewhere", "total")
    model_s = plain_s(story)
    paces = {"drafted": pace(story, drafted=True), "plain": pace(story, drafted=False)}
    return {
        "spent_ms": {name: _ms(getattr(where, f"{name}_s")) for name in names},
        "rounds": {
            told: {"rounds": each.num_rounds, "tokens": each.num_tokens, "ms": _ms(each.step_s)}
            for told, each in paces.items()
        },
        "plain_verify_ms": None if model_s is None else _ms(model_s),
        "drafters": {
            each.source: {
                "asked": each.num_asked,
                "replies": each.num_replies,
                "late": each.num_late,
                "drafted": each.drafted,
                "accepted": each.accepted,
                "reply_ms": _ms(each.latency_s),
                "drafter_ms": _ms(each.drafter_s),
            }
            for each in sources(story)
        },
    }


def _part(part: Part) -> Json:
    if isinstance(part, Preempted):
        return {"kind": "preempted", "base_len": part.base_len}
    told: Json = {"start": part.start, "num_rows": part.num_rows, "step": _step(part.step)}
    if isinstance(part, Chunk):
        return {"kind": "chunk", **told}
    return {"kind": "round", **told, **_round(part)}


def _round(part: Round) -> Json:
    return {
        "number": part.number,
        "base_len": part.base_len,
        "is_prompt": part.is_prompt,
        "asked": [{"source": a.source, **_plan(a.plan)} for a in part.asked],
        "answered": [
            {
                "source": d.source,
                "nodes": d.num_nodes,
                "reply_ms": _ms(d.latency_s),
                "drafter_ms": _ms(d.drafter_s),
                "late": d.was_late,
            }
            for d in part.drafted
        ],
        "tree": {
            "tokens": list(part.tree.tokens),
            "parents": list(part.tree.parents),
            "scores": list(part.tree.scores),
            "sources": [list(names) for names in part.sources],
        },
        "accepted_nodes": list(part.nodes),
        "choices": list(part.choices),
        "ids": list(part.ids),
    }


def _plan(plan: Plan) -> Json:
    return {
        "kind": plan.kind.value,
        "depth": plan.depth,
        "width": plan.width,
        "nodes": plan.nodes,
    }


def _step(step: StepFacts) -> Json:
    return {
        "number": step.number,
        "requests": step.num_requests,
        "rows": step.num_rows,
        "ms": _ms(step.step_s),
        "wait_ms": _ms(step.wait_s),
        "forward_ms": _ms(step.forward_s),
        "choose_ms": _ms(step.choose_s),
        "rest_ms": _ms(step.rest_s),
        "why": step.why,
        "expected": step.expected,
        "plain_verify_ms": _ms(step.plain_s),
        "predicted_verify_ms": _ms(step.predicted_s),
    }


def _ms(took_s: float) -> float:
    return round(1000.0 * took_s, 3)
