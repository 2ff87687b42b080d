"""`outrider data answer`: the target's answers to prompts, in an answers file that can resume.

Knows prompts and files, not how generations are batched. A conversation's answers are written
together; after a crash a conversation that is not whole is answered again, so the finished file
is the same as one written without a break.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from protos.errors import ConfigError, ContextTooLong
from verifier_service.data.answers_file import Answer, AnswersFile, make_header
from verifier_service.data.chat import Chat
from verifier_service.data.conversations import Conversation, Message, Sampler, digest_of
from verifier_service.data.writer import Ask, Job, run_in_order
from verifier_service.engine.loop import Engine

Report = Callable[[int, int, int], None]
"""Called with conversations done, conversations in all, and answer tokens written by this run."""


def answer_all(
    engine: Engine,
    chat: Chat,
    conversations: Sequence[Conversation],
    sampler: Sampler,
    out: Path,
    window: int,
    report: Report,
) -> int:
    """Write the answers to all conversations; returns the number of records in the file."""
    facts = engine.target.facts
    temperatures = ", ".join(f"{t:g}" for t in sampler.temperatures)
    sampling = f"temperatures {temperatures} in turn, top-k {sampler.top_k}, seed {sampler.seed}"
    run = {
        "sampling": f"{sampling}, at most {sampler.max_tokens} tokens",
        "target_digest": facts.digest,
        "fingerprint": facts.fingerprint,
        "prompts": digest_of(conversations),
    }
    store = AnswersFile(out, make_header(facts.name, facts.vocab_size, run))
    done, kept = _resume_point(store, chat, conversations)
    store.cut_to(kept)
    jobs = (_answer(engine, chat, conversation, sampler) for conversation in conversations[done:])
    num_records, num_tokens = kept, 0
    for answers in run_in_order(engine, jobs, window):
        store.append(answers)
        done += 1
        num_records += len(answers)
        num_tokens += sum(len(answer.answer_ids) for answer in answers)
        report(done, len(conversations), num_tokens)
    store.seal()
    return num_records


def _answer(
    engine: Engine, chat: Chat, conversation: Conversation, sampler: Sampler
) -> Job[list[Answer]]:
    """Answer the messages, then each further turn; ends early where the context is full."""
    messages: list[Message] = list(conversation.messages)
    answers: list[Answer] = []
    for turn in range(1 + len(conversation.turns)):
        prompt_ids = chat.prompt_ids(messages)
        if len(prompt_ids) + 1 >= engine.max_context:
            if not answers:
                raise ContextTooLong(
                    f"prompt {conversation.index} has {len(prompt_ids)} tokens; "
                    f"the context holds {engine.max_context}"
                )
            break
        answer_ids = yield Ask(prompt_ids, sampler.params(conversation.index, turn))
        answers.append(Answer(prompt_ids, answer_ids))
        if turn < len(conversation.turns):
            messages.append({"role": "assistant", "content": chat.text(answer_ids)})
            messages.append({"role": "user", "content": conversation.turns[turn]})
    return answers


def _resume_point(
    store: AnswersFile, chat: Chat, conversations: Sequence[Conversation]
) -> tuple[int, int]:
    """Conversations that are whole in the file, and the records they take.

    A conversation begins with the record whose prompt is its first one. The last that has begun
    is whole if all its turns are there, or if another one has begun after it. Raises ConfigError
    rather than drop records that belong to other prompts.
    """
    begins = list(_begins(store, chat, conversations))
    if not store.answers:
        return 0, 0
    if begins[:1] != [0]:
        raise ConfigError("the answers file does not begin with the first of these prompts")
    last = begins[-1]
    held = len(store.answers) - last
    if held == 1 + len(conversations[len(begins) - 1].turns):
        return len(begins), len(store.answers)
    return len(begins) - 1, last


def _begins(store: AnswersFile, chat: Chat, conversations: Sequence[Conversation]) -> Iterator[int]:
    waiting = iter(conversations)
    following = next(waiting, None)
    for place, answer in enumerate(store.answers):
        if following is None:
            return
        if answer.prompt_ids == chat.prompt_ids(following.messages):
            yield place
            following = next(waiting, None)
