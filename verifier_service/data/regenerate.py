"""`outrider data regenerate`: the target's answers to prompts, in an answers file that can resume.

    user 1 -> answer 1 -> user 2 -> answer 2 ...      each answered with the target's own history

Knows prompts and files, not how generations are batched. A conversation's answers are written
together. To resume, the conversations are played again with the answers that the file holds: what
a conversation would ask must be what was asked. The last one, if it is not whole, is answered
again, so the finished file is the same as one written without a break.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from protos.errors import ConfigError, InvalidRequest
from verifier_service.data.answers_file import Answer, AnswersFile, Header, make_header
from verifier_service.data.chat import Chat
from verifier_service.data.conversations import Conversation, Message, Sampler, digest_of
from verifier_service.data.skips import Skips
from verifier_service.data.writer import Ask, Job, run_in_order
from verifier_service.engine.loop import Engine

Report = Callable[[int, int, int], None]
"""Called with conversations done, conversations in all, and answer tokens written by this run."""

TOO_LONG = "longer than the context"
REFUSED = "refused by the chat template"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one conversation (or candidate): answers, or why it was skipped."""

    index: int
    answers: tuple[Answer, ...]
    skipped: str = ""

    @property
    def num_tokens(self) -> int:
        """Answer tokens."""
        return sum(len(answer.answer_ids) for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Totals:
    """A finished file. skips: conversations that could not be asked, in this run or before."""

    num_records: int
    num_conversations: int
    skips: Skips


class AnswersRun:
    """The answers file of one run: resumes it, takes outcomes in order, finishes it."""

    def __init__(
        self,
        out: Path,
        header: Header,
        chat: Chat,
        max_context: int,
        conversations: Sequence[Conversation],
        sampler: Sampler,
    ) -> None:
        """Raises ConfigError when the file holds another run, or answers to other prompts."""
        self._out = out
        self._conversations = conversations
        self._skips = Skips()
        self._store = AnswersFile(out, header)
        self._num_records = self.done = 0
        self._replay(chat, max_context, sampler)
        self._store.cut_to(self._num_records)

    def append(self, outcome: Outcome) -> None:
        """Write the next conversation's answers."""
        conversation = self._conversations[self.done]
        assert outcome.index == conversation.index
        self._store.append(outcome.answers)
        self._count(outcome)

    def finish(self) -> Totals:
        """Seal the file. Raises ConfigError, and leaves no file, when nothing could be asked."""
        if not self._num_records:
            self._out.unlink()
            raise ConfigError(f"no prompt can be answered: {self._skips.describe()}")
        self._store.seal()
        return Totals(self._num_records, self.done, self._skips)

    def _count(self, outcome: Outcome) -> None:
        if outcome.skipped:
            self._skips.add(outcome.skipped, self._conversations[self.done].where)
        self._num_records += len(outcome.answers)
        self.done += 1

    def _replay(self, chat: Chat, max_context: int, sampler: Sampler) -> None:
        """Count the conversations that are whole in the file."""
        answers = self._store.answers
        for conversation in self._conversations:
            if self._num_records == len(answers):
                return
            outcome = _replayed(
                answer_job(chat, max_context, conversation, sampler), answers[self._num_records :]
            )
            if outcome is None:
                return
            self._count(outcome)
        if self._num_records < len(answers):
            raise ConfigError(f"{self._out.name} holds more answers than these prompts ask for")


def _replayed(job: Job[Outcome], answers: Sequence[Answer]) -> Outcome | None:
    """The outcome that these answers, the first ones, lead to; None when they break off."""
    try:
        ask = next(job)
        for answer in answers:
            if answer.prompt_ids != ask.prompt_ids:
                raise ConfigError("the answers file holds answers to other prompts")
            ask = job.send(answer.answer_ids)
    except StopIteration as stop:
        outcome: Outcome = stop.value
        return outcome
    return None


def regenerate(
    engine: Engine,
    chat: Chat,
    conversations: Sequence[Conversation],
    sampler: Sampler,
    out: Path,
    window: int,
    report: Report,
) -> Totals:
    """Write the answers to all conversations, those that the file holds left as they are.

    window: conversations under way at once. Raises ConfigError when the file belongs to another
    run, or when not one conversation can be asked.
    """
    facts = engine.target.facts
    header = answers_header(
        facts.name, facts.vocab_size, facts.digest, facts.fingerprint, conversations, sampler
    )
    run = AnswersRun(out, header, chat, engine.max_context, conversations, sampler)
    jobs = (
        answer_job(chat, engine.max_context, conversation, sampler)
        for conversation in conversations[run.done :]
    )
    num_tokens = 0
    for outcome in run_in_order(engine, jobs, window):
        run.append(outcome)
        num_tokens += outcome.num_tokens
        report(run.done, len(conversations), num_tokens)
    return run.finish()


def answers_header(
    target: str,
    vocab_size: int,
    digest: str,
    fingerprint: str,
    conversations: Sequence[Conversation],
    sampler: Sampler,
) -> Header:
    """The header that a run of these conversations on this target writes, and must find."""
    run = {
        "sampling": sampler.describe(),
        "target_digest": digest,
        "fingerprint": fingerprint,
        "prompts": digest_of(conversations),
    }
    return make_header(target, vocab_size, run)


def answer_job(
    chat: Chat, max_context: int, conversation: Conversation, sampler: Sampler
) -> Job[Outcome]:
    """Answer the messages, then each further turn; ends early where the context is full.

    Skipped, not answered: a first prompt that leaves no room for an answer, and messages that the
    chat template refuses.
    """
    index = conversation.index
    messages: list[Message] = list(conversation.messages)
    answers: list[Answer] = []
    for turn in range(1 + len(conversation.turns)):
        try:
            prompt_ids = chat.prompt_ids(messages)
        except InvalidRequest:
            return Outcome(index, tuple(answers), "" if answers else REFUSED)
        if len(prompt_ids) + 1 >= max_context:
            return Outcome(index, tuple(answers), "" if answers else TOO_LONG)
        answer_ids = yield Ask(prompt_ids, sampler.params(index, turn))
        answers.append(Answer(prompt_ids, answer_ids))
        if turn < len(conversation.turns):
            messages.append({"role": "assistant", "content": chat.text(answer_ids)})
            messages.append({"role": "user", "content": conversation.turns[turn]})
    return Outcome(index, tuple(answers))
