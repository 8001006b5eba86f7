# Conversations as a training would read them: what is dropped and cut, what the loss mask covers, whether an answer
# ends as the target ends it, and whether the template gives in training what it gives in decoding.

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.doctor.case import Case
    from data.doctor.findings import Findings
    from drafters.types import Conversation, Example

__all__ = ["check", "check_mask", "shown_example"]

DROPPED, TRUNCATED = 0.05, 0.10  # shares of conversations
SUPERVISED = (0.05, 0.95)  # share of tokens: below it training mostly reads prompts, above it the mask covers them
ENDED = 0.90  # share of whole answers whose last supervised token ends the turn
CUT = 0.20  # share of conversations whose answers were cut at a length limit
SHARED = 0.02  # share of held-out conversations whose prompt is trained on, too
NUM_PROMPTS = 50  # prompts that are tokenised as decoding does
THOUGHT = "</think>"


def check(case: "Case") -> bool:
    """Read, encode and look at the conversations; whether there are any to go on with."""
    from data.sources import load_splits
    from drafters.chat import ChatEncoder
    from drafters.door import load_target
    from drafters.splits import encode_splits

    with case.findings.watched("target/weights"):
        case.outline = load_target(case.node, device=None, is_outline=True)
        spec = case.outline.spec
        case.findings.ok("target/weights", f"{spec.name}, weights {spec.weights_hash[:12]}, {spec.dtype}")
    if not case.has_outline:
        return False
    with case.findings.watched("text/source"):
        parts = load_splits(case.source, validation=case.data.validation, seed=case.data.seed)
        case.conversations = dict(zip(("train", "validation"), parts, strict=True))
    with case.findings.watched("text/template"):
        kwargs = case.data.template_kwargs
        case.encoder = ChatEncoder(case.outline.tokenizer, max_length=case.data.max_length, template_kwargs=kwargs)
    if not case.conversations or case.encoder is None:
        return False
    with case.findings.watched("text/source"):
        case.splits, case.reports = encode_splits(parts, case.encoder, weights_hash=None)
    if not case.splits:
        return False
    counts = ", ".join(f"{len(split):,} for {name}" for name, split in case.splits.items())
    case.findings.ok("text/source", f"{len(case.examples):,} conversations: {counts}")
    if not case.splits["validation"]:
        advice = "data.validation: a share above 0, or rows whose `split` is validation"
        case.findings.problem("text/source", "no conversation is held out, and train.py needs some", advice)
    check_mask(case)
    check_ends(case)
    check_prompts(case)
    check_thinking(case)
    check_mask_token(case)
    check_overlap(case)
    check_authors(case.findings, everything(case), case.outline.spec.weights_hash)
    return True


def everything(case: "Case") -> "list[Conversation]":
    """The conversations of all splits."""
    return [one for part in case.conversations.values() for one in part]


def pairs(case: "Case") -> "list[tuple[Example, Conversation]]":
    """Each example with the conversation that it was made of."""
    known = {(one.source, one.id): one for one in everything(case)}
    return [(example, known[example.source, example.id]) for example in case.examples]


def check_mask(case: "Case") -> None:
    """Shares of what is supervised, cut off, left out."""
    findings, reports = case.findings, case.reports.values()
    total = sum(one.num_conversations for one in reports)
    tokens, supervised = (sum(getattr(one, name) for one in reports) for name in ("num_tokens", "num_supervised"))
    share, (low, high) = supervised / max(1, tokens), SUPERVISED
    found = f"{supervised:,} of {tokens:,} tokens are supervised, {share:.0%} (expected: {low:.0%} to {high:.0%})"
    if low <= share <= high:
        findings.ok("text/mask", found)
    else:
        findings.warning("text/mask", found, "look at the example below: is it the answers that are marked?")
    dropped: dict[str, int] = {}
    for one in reports:
        for reason, count in one.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    num_dropped = sum(dropped.values())
    reasons = "; ".join(f"{count:,}: {reason}" for reason, count in dropped.items())
    if num_dropped > DROPPED * total:
        advice = "python -m data.regenerate gives prompts their answers; data.max_length keeps longer ones"
        findings.warning("text/dropped", f"{num_dropped:,} of {total:,} conversations give nothing; {reasons}", advice)
    elif num_dropped:
        findings.note("text/dropped", f"{num_dropped:,} of {total:,} conversations give nothing; {reasons}")
    else:
        findings.ok("text/dropped", "every conversation has supervised tokens")
    cut = sum(one.num_truncated for one in reports)
    found = f"{cut:,} of {total:,} are cut off at {case.data.max_length} tokens"
    if cut > TRUNCATED * total:
        findings.warning("text/truncated", f"{found}, more than {TRUNCATED:.0%}", "a larger data.max_length")
    else:
        findings.ok("text/truncated", found)
    if skipped := sum(one.num_skipped_turns for one in reports):
        findings.note(
            "text/prefix",
            f"{skipped:,} earlier answers are not supervised: the template rewrites them, so that the prompt is not a "
            "prefix of what follows",
            "expected of templates that strip earlier reasoning; else check data.template_kwargs",
        )


def check_ends(case: "Case") -> None:
    """Whether answers end, supervised, with a token at which the target stops."""
    findings, outline = case.findings, case.outline
    assert outline is not None
    tokenizer, stops = outline.tokenizer, set(outline.spec.eos_ids)
    last: dict[int, int] = {}
    num_cut = 0
    for example, conversation in pairs(case):
        answers = [one for one in conversation.messages if one.role == "assistant"]
        if answers[-1].finish_reason == "length":
            num_cut += 1
        elif not example.truncated:
            token = int(example.tokens_T[example.loss_mask_T][-1])
            last[token] = last.get(token, 0) + 1
    if num_cut > CUT * len(case.examples):
        found = f"{num_cut:,} of {len(case.examples):,} answers were cut at a length limit, more than {CUT:.0%}"
        findings.note("text/ends", found, "python -m data.regenerate with a larger max_new_tokens shows more ends")
    if not (whole := sum(last.values())):
        findings.note("text/ends", "no whole answer, so none shows how it ends")
        return
    ended = sum(count for token, count in last.items() if token in stops) / whole
    names = ", ".join(repr(tokenizer.decode([token])) for token in sorted(stops))
    found = f"{ended:.0%} of {whole:,} whole answers end with a token at which the target stops ({names})"
    if ended >= ENDED:
        findings.ok("text/ends", f"{found}, and it is supervised")
        return
    common = tokenizer.decode([max(last, key=lambda token: last[token])])
    findings.warning(
        "text/ends",
        f"{found}, fewer than {ENDED:.0%}; most end with {common!r}: the drafter does not learn where answers end",
        "is this the template that the target was tuned with, and are its end-of-turn ids in generation_config.json?",
    )


def check_prompts(case: "Case") -> None:
    """Whether the tokens before an answer are those that decoding would begin with."""
    findings, encoder, outline = case.findings, case.encoder, case.outline
    assert encoder is not None
    assert outline is not None
    differing, looked = [], 0
    for example, conversation in pairs(case)[:NUM_PROMPTS]:
        last = max(i for i, one in enumerate(conversation.messages) if one.role == "assistant")
        prompt = encoder.prompt(conversation.messages[:last]).tolist()
        if len(prompt) < len(example.tokens_T):
            looked += 1
            if example.tokens_T[: len(prompt)].tolist() != prompt:
                differing.append(conversation.id)
    if differing:
        findings.warning(
            "text/prompt",
            f"{len(differing)} of {looked} prompts give other tokens in decoding than before their answers in "
            f"training; first: {differing[0]}",
            "does the template change earlier turns, or end its generation prompt within a token?",
            cost=len(differing) / looked,
        )
    elif looked:
        findings.ok("text/prompt", f"{looked} prompts, as decoding tokenises them, are prefixes of their conversations")
    bos = outline.spec.bos_id
    twice = sum(example.tokens_T[:2].tolist() == [bos, bos] for example in case.examples)
    if bos is not None and twice:
        findings.warning("text/prompt", f"{twice:,} conversations begin with two beginning-of-text tokens", "template")


def check_mask_token(case: "Case") -> None:
    """Whether conversations use the token that stands for what is to be drafted."""
    assert case.outline is not None
    token = case.outline.spec.mask_token_id
    name = f"the mask token {case.outline.tokenizer.decode([token])!r} ({token})"
    used = sum(bool((one.tokens_T == token).any()) for one in case.examples)
    if used:
        found = f"{name} is in {used:,} of {len(case.examples):,} conversations, where it means something else"
        case.findings.warning("text/mask-token", found, "target.mask_token= a special token that chats never use")
    else:
        case.findings.ok("text/mask-token", f"no conversation uses {name}")


def check_overlap(case: "Case") -> None:
    """Whether prompts that are held out are trained on, too."""

    def prompt(one: "Conversation") -> tuple[Any, ...]:
        return tuple(takewhile(lambda message: message.role != "assistant", one.messages))

    trained = {prompt(one) for one in case.conversations["train"]}
    held_out = case.conversations["validation"]
    twice = sum(prompt(one) in trained for one in held_out)
    found = f"{twice:,} of {len(held_out):,} held-out prompts are trained on, too"
    if twice > SHARED * len(held_out):
        advice = "validation then says more than decoding gives: keep each prompt in one split, by a `split` column"
        case.findings.warning("text/overlap", f"{found}, more than {SHARED:.0%}", advice)
    elif held_out:
        case.findings.ok("text/overlap", found)


def check_thinking(case: "Case") -> None:
    """Whether the template has a switch for thinking, how it stands, and whether the answers go with it."""
    from drafters.chat import ChatEncoder
    from drafters.types import Message

    findings, outline, kwargs = case.findings, case.outline, case.data.template_kwargs
    assert outline is not None

    def rendered(**given: bool) -> list[int]:
        made = ChatEncoder(outline.tokenizer, max_length=64, template_kwargs={**kwargs, **given})
        return made.prompt([Message(role="user", content="Hello")]).tolist()

    on, off, now = rendered(enable_thinking=True), rendered(enable_thinking=False), rendered()
    thinkers = [(example, one) for example, one in pairs(case) if _thinks(one)]
    lost = [example for example, _ in thinkers if THOUGHT not in _supervised(example, outline.tokenizer)]
    share = f"{len(thinkers):,} of {len(case.examples):,} conversations have answers with {THOUGHT}"
    if lost:
        findings.warning(
            "text/thinking",
            f"{share}; in {len(lost):,} of them the template takes the thinking out of what is supervised",
            "if the target thinks when it serves, check data.template_kwargs and data.max_length",
        )
    elif on != off and (now == on) != bool(thinkers):
        findings.warning(
            "text/thinking",
            f"{share}, but the template's prompt asks for {'thinking' if now == on else 'no thinking'}",
            f"data.template_kwargs={{enable_thinking: {str(now != on).lower()}}}, or let the target answer anew",
        )
    else:
        switch = "has a switch for thinking" if on != off else "has no switch enable_thinking"
        findings.ok("text/thinking", f"{share}; the template {switch} and keeps what the answers hold")


def _thinks(conversation: "Conversation") -> bool:
    return any(THOUGHT in one.content for one in conversation.messages if one.role == "assistant")


def _supervised(example: "Example", tokenizer: Any) -> str:
    return str(tokenizer.decode(example.tokens_T[example.loss_mask_T].tolist()))


def check_authors(findings: "Findings", conversations: "Sequence[Conversation]", weights_hash: str) -> None:
    """Who wrote the answers, as the conversations say themselves."""
    own = sum(one.answered_by == weights_hash for one in conversations)
    unknown = sum(one.answered_by is None for one in conversations)
    found = f"{own:,} of {len(conversations):,} conversations say that this target wrote the answers"
    if other := len(conversations) - own - unknown:
        advice = "python -m data.regenerate: a drafter learns best from the target's own answers"
        findings.warning("answers/authors", f"{found}, {other:,} name another model", advice)
    elif unknown:
        findings.note("answers/authors", f"{found}, {unknown:,} do not say who did; see what was measured")
    else:
        findings.ok("answers/authors", found)


def shown_example(case: "Case", *, marks: bool) -> Any:
    """The shortest of the first examples as rich text, supervised tokens marked, and its title."""
    from data.show import highlighted

    assert case.outline is not None
    example = min(case.examples[:20], key=lambda one: len(one.tokens_T))
    title = f"{example.id} ({example.source}), the shortest of the first 20: supervised tokens are marked"
    return title, highlighted(example, case.outline.tokenizer, marks=marks)
