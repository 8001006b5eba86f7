# Watching: the text stays the tokenizer's own however its bytes are cut into tokens, each token is shown as its
# writer's, and nothing that a model writes is taken for markup or obeyed by the terminal.

import io

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.records import Generation, Round, RunTimings
from drafters.decoding.show import TokenText, _Screen, watch
from drafters.errors import ConfigError
from drafters.types import Sampling
from tests.copy_drafter import CopyDrafter, sharp_target

LEGEND = "⟦drafted⟧ the target's own  ╎ a round ends\n"


class ByteTokenizer:
    """Token i is the i-th of `pieces`, which may cut characters."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, tokens, *, clean_up_tokenization_spaces):
        assert not clean_up_tokenization_spaces
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", "replace")


def cut(text, *places):
    """The bytes of `text`, cut at `places`."""
    data = text.encode()
    return [data[a:b] for a, b in zip((0, *places), (*places, len(data)), strict=True)]


def console(**settings):
    return Console(file=io.StringIO(), **settings)


def shown(script, pieces, *, by_round=False, is_tree=False, **settings):
    """What a screen prints of a script of (round, new tokens, drafts) after token 0."""
    recorder = console(**settings)
    screen = _Screen(ByteTokenizer(pieces), recorder, by_round=by_round, is_tree=is_tree)
    screen.begin([0])
    for done, tokens, drafts in script:
        screen.on_round(0, done, tokens, drafts)
    tokens = [0, *(token for _, new, _ in script for token in new)]
    screen.end(Generation(0, tokens, [done for done, _, _ in script], "length"), RunTimings())
    return recorder.file.getvalue()


def chain(proposed, accepted, gained=None):
    return Round(proposed, accepted, accepted + 1 if gained is None else gained, True, 5)


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("text", ["plain", "grüße 🙂 日本", "\ufffd is a character", "👩‍👩‍👧 and \ufffd\ufffd"])
def test_pieces_joined_are_the_decoding_of_all(text, width):
    data = text.encode()
    tokenizer = ByteTokenizer([data[i : i + width] for i in range(0, len(data), width)])
    tokens = list(range(len(tokenizer.pieces)))
    growing = TokenText(tokenizer)
    given = [growing.add(token) for token in tokens]
    assert "".join(given) + growing.rest() == text
    # No piece shows half a character.
    assert all(piece in text for piece in given)


def test_bytes_that_are_no_text_come_at_the_end():
    tokenizer = ByteTokenizer([b"a\xe2", b"\x82", b"!", b"\xf0\x9f"])
    growing = TokenText(tokenizer)
    given = [growing.add(token) for token in range(4)]
    assert given == ["a", "", "\ufffd!", ""]
    assert "".join(given) + growing.rest() == tokenizer.decode(range(4), clean_up_tokenization_spaces=False)


def test_a_tokenizer_that_falls_back_to_bytes_word_by_word():
    words = ["▁The", "▁", "sky", *(f"<0x{byte:02X}>" for byte in "€🚀".encode()), "<unk>"]
    model = models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    tokens = [0, 1, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 2, 1, 1, 0]
    growing = TokenText(fast)
    given = [growing.add(token) for token in tokens]
    assert "".join(given) + growing.rest() == fast.decode(tokens) == "The €€🚀sky   The"
    assert all("\ufffd" not in piece for piece in given)


def test_without_colour_marks_tell_writers_and_rounds():
    pieces = [b"The", b" sky", b" is", b" blue", b"."]
    out = shown([(chain(2, 2), [1, 2, 3], [1, 2]), (chain(2, 0), [4], [3, 3])], pieces)
    assert out == LEGEND + "The╎⟦ sky is⟧ blue╎.╎\n2 rounds, 5 tokens, accepted length 2.00 (bonus included)\n"


def test_a_round_that_was_cut_has_no_token_of_the_targets():
    out = shown([(chain(3, 3, gained=2), [1, 2], [1, 2, 3])], [b"a", b"b", b"c", b"d"])
    assert "a╎⟦bc⟧╎\n" in out


def test_a_character_belongs_to_the_token_that_completes_it():
    out = shown([(chain(1, 1), [1, 2], [1])], cut("a€b", 1, 3))
    assert "a╎€b╎\n" in out
    out = shown([(chain(2, 2), [1, 2, 3], [1, 2])], cut("a€b", 1, 3, 4))
    assert "a╎⟦€⟧b╎\n" in out


def test_markup_line_ends_and_control_characters_are_shown_not_obeyed():
    pieces = [b"[red]", b"x[/red]\n", b"\n :smile: ", b"\x1b[31m\r\x9b".decode("latin-1").encode(), b"\ty  "]
    out = shown([(chain(2, 2), [1, 2, 3], [1, 2]), (chain(0, 0), [4], [])], pieces)
    assert "[red]╎⟦x[/red]↵\n↵\n :smile: ⟧\\x1b[31m\\r\\x9b╎" in out
    assert "y  ╎\n2 rounds" in out
    assert not {"\x1b", "\r", "\x9b"} & set(out)


def test_with_colour_the_text_has_no_marks_and_rounds_change_shade():
    settings = dict(force_terminal=True, color_system="truecolor", no_color=False, width=10)
    pieces = [b"one ", b"two ", b"three ", b"four ", b"five\n", b"six"]
    script = [(chain(1, 1), [1, 2], [1]), (chain(1, 0), [3], [5]), (chain(1, 1), [4, 5], [4])]
    out = shown(script, pieces, **settings)
    orange, pale_orange, pale_blue = "48;2;230;159;0", "48;2;245;205;117", "48;2;166;213;242"
    runs = [(orange, "one "), (pale_blue, "two "), (pale_orange, "three "), (orange, "four ")]
    runs += [(pale_blue, "five↵"), (pale_blue, ""), (pale_orange, "six")]
    # Wider than the console: the terminal breaks lines, the text is not changed.
    body = "".join(f"\x1b[30;{style}m{text}\x1b[0m" if text else "\n" for style, text in runs)
    assert f"shades take turns by round\n{body}\n" in out


def test_no_color_gets_marks(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "⟦drafted⟧" in shown([], [b"a"], force_terminal=True, color_system="truecolor")


def test_a_line_for_each_round_shows_what_was_rejected():
    pieces = [b"The", b" sky", b" is\n", b" blue", b" gray", b"ish"]
    script = [(chain(3, 1), [1, 2], [1, 4, 5]), (chain(2, 0), [3], [4, 5]), (chain(0, 0), [2], [])]
    lines = shown(script, pieces, by_round=True).splitlines()
    assert lines[0] == "⟦drafted⟧ the target's own  ✗⟦rejected⟧"
    assert lines[1:5] == [
        "   0  first token  The",
        "   1   1 of  3     ⟦ sky⟧ is↵ ✗⟦ grayish⟧",
        "   2   0 of  2      blue ✗⟦ grayish⟧",
        "   3   0 of  0      is↵",
    ]


def test_rejected_drafts_of_a_tree_stand_alone():
    pieces = [b"The", b" sky", b" is", b" sea", b" was"]
    done = [
        (Round(4, 2, 3, True, 5, slots=(0, 2)), [1, 2, 3], [1, 3, 2, 4]),
        (Round(2, 0, 1, True, 8), [1], [2, 4]),
    ]
    lines = shown(done, pieces, by_round=True, is_tree=True).splitlines()
    assert lines[2] == "   1   2 of  4     ⟦ sky is⟧ sea ✗⟦ sea⟧ ✗⟦ was⟧"
    assert lines[3] == "   2   0 of  2      sky ✗⟦ is⟧ ✗⟦ was⟧"


@pytest.fixture(scope="module")
def target():
    target = sharp_target(vocab_size=128, scale=30)
    # Every token is two bytes, so that characters of three and four cross tokens.
    data = ("日本🙂grüße€ [b]a[/b]\n" * 20).encode()
    target.tokenizer = ByteTokenizer([data[i : i + 2] for i in range(0, 256, 2)])
    return target


@pytest.fixture(scope="module")
def drafter():
    return CopyDrafter(sharp_target(vocab_size=128, scale=30, noise=0.3), block_size=3)


@pytest.mark.parametrize("by_round", [False, True])
def test_what_is_watched_is_what_is_decoded(target, drafter, by_round):
    prompt, config = torch.tensor([5, 9, 17]), DecodeConfig(max_new_tokens=40, stop_ids=())
    recorder = console()
    generation = watch(target, drafter, prompt, config, recorder, rounds=by_round)
    plain = decode(target, drafter, [prompt], config)[0]
    assert (generation.tokens, generation.rounds) == (plain.tokens, plain.rounds)
    accepted = {done.accepted for done in generation.rounds}
    assert {0, 3} <= accepted, "the script should have rounds of both kinds"
    out = recorder.file.getvalue()
    assert f"{len(plain.rounds)} rounds, 40 tokens, accepted length " in out
    assert "tokens/s" in out
    if not by_round:
        body = out.removeprefix(LEGEND).rpartition("\n")[0].rpartition("\n")[0]
        for mark in "⟦⟧╎↵":
            body = body.replace(mark, "")
        assert body == target.tokenizer.decode(plain.tokens, clean_up_tokenization_spaces=False)


def test_sampled_text_begins_with_its_own_first_token(target, drafter):
    for seed in range(5):
        config = DecodeConfig(max_new_tokens=8, stop_ids=(), seed=seed, sampling=Sampling(temperature=1.0))
        recorder = console()
        generation = watch(target, drafter, torch.tensor([5, 9, 17]), config, recorder, rounds=True)
        line = recorder.file.getvalue().splitlines()[1]
        first = TokenText(target.tokenizer).add(generation.tokens[0])
        assert line == f"   0  first token  {first}".replace("\n", "↵")


def test_without_a_drafter_every_token_is_the_targets(target):
    recorder = console()
    watch(target, None, torch.tensor([5, 9]), DecodeConfig(max_new_tokens=6, stop_ids=()), recorder)
    out = recorder.file.getvalue()
    assert "⟦" not in out.removeprefix(LEGEND)
    assert "5 rounds, 6 tokens, accepted length 1.00" in out


def test_one_token_is_no_round(target, drafter):
    recorder = console()
    watch(target, drafter, torch.tensor([5, 9]), DecodeConfig(max_new_tokens=1), recorder)
    assert recorder.file.getvalue().endswith("\n0 rounds, 1 tokens\n")


def test_a_target_without_tokenizer_is_refused(drafter):
    bare = sharp_target(vocab_size=128, scale=30)
    with pytest.raises(ConfigError, match="no tokenizer"):
        watch(bare, drafter, torch.tensor([5]), DecodeConfig(), console())
