# Whole measurements on tiny models: every key is there, numbers agree with each other, and what a drafter did to the
# text or to the clock is seen.

import math
from dataclasses import fields, replace

import pytest
import torch

from drafters.decoding.dispatch import dispatch_share
from drafters.decoding.divergence import first_difference, logit_margin
from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.measure import TREE_SIZES, Contestant, measure
from drafters.decoding.report import CONTRACT_KEYS, Report
from drafters.decoding.tree import Tree
from drafters.errors import ConfigError, DataError
from drafters.heads.ngram import NgramDrafter
from drafters.types import Needs, Sampling
from tests.copy_drafter import CopyDrafter, sharp_target
from tests.measure_cases import CONFIG, GAMMA, Scripted, dialogue, dialogues_of, measured, steady

QUICK = replace(CONFIG, profile_rounds=1, num_speed_prompts=1)


@pytest.fixture(scope="module")
def target():
    return sharp_target(vocab_size=64, scale=30)


@pytest.fixture(scope="module")
def drafter():
    return CopyDrafter(sharp_target(vocab_size=64, scale=30, noise=0.3), block_size=GAMMA)


@pytest.fixture(scope="module")
def report(target, drafter):
    contestants = {"copy": Contestant(drafter=drafter, provenance={"command": "evaluate.py"})}
    return measure(target, contestants, dialogues_of(6), CONFIG)["copy"]


def test_the_report_holds_the_contract_and_agrees_with_itself(report):
    values = report.to_dict()
    assert set(values) >= CONTRACT_KEYS
    assert (report.schema, report.name) == (2, "copy")
    assert report.accepted_length == pytest.approx(report.tokens / report.rounds)
    low, high = report.accepted_length_ci95
    assert 1 <= low < report.accepted_length < high <= GAMMA + 1
    assert len(report.acceptance_by_position) == len(report.acceptance_by_position_ci95) == GAMMA
    for a, (low, high) in zip(report.acceptance_by_position, report.acceptance_by_position_ci95, strict=True):
        assert 0 <= low <= a <= high <= 1
    assert sum(report.accepted_histogram) == report.rounds
    assert 1 <= report.draft_length <= GAMMA
    assert report.speedup == pytest.approx(report.tokens_per_second / report.baseline_tokens_per_second)
    assert report.speedup_ci95[0] <= report.speedup <= report.speedup_ci95[1]
    best = max(report.costs, key=lambda cost: cost.predicted_speedup)
    assert (report.draft_length, report.predicted_speedup) == (best.length, best.predicted_speedup)
    assert report.prediction.error == pytest.approx(report.prediction.speedup / report.speedup - 1)
    assert report.divergences == {"prompts": 0, "compared": 6, "first": []}
    assert 0 < report.dispatch_share < 1
    assert report.provenance["command"] == "evaluate.py"
    assert {"drafters", "python", "torch", "transformers"} == set(report.provenance["versions"])


def test_prompts_and_units_add_up_to_the_whole(report):
    assert [one.prompt for one in report.per_prompt] == list(range(6))
    assert [one.source for one in report.per_prompt] == ["maths"] * 4 + ["chat"] * 2
    assert {one.turn for one in report.per_prompt} == {0}
    sums = [sum(getattr(one, name) for one in report.per_prompt) for name in ("tokens", "rounds")]
    assert sums == [report.tokens, report.rounds]
    assert [one.unit for one in report.per_unit] == list(range(6))
    tokens, seconds = (sum(getattr(one, name) for one in report.per_unit) for name in ("tokens", "seconds"))
    assert report.tokens_per_second == pytest.approx(tokens / seconds)
    assert report.baseline_tokens_per_second == pytest.approx(
        sum(one.baseline_tokens for one in report.per_unit) / sum(one.baseline_seconds for one in report.per_unit)
    )


def test_measured_reports_read_back(report, tmp_path):
    report.save(tmp_path)
    back = Report.load(tmp_path / "report.json")
    # By context no speed is known, and NaN equals nothing.
    for field in fields(Report):
        if field.name != "by_context":
            assert getattr(back, field.name) == getattr(report, field.name)
    assert back.by_context.keys() == report.by_context.keys()


def test_sources_are_told_apart(report):
    assert {name: part.prompts for name, part in report.by_source.items()} == {"maths": 4, "chat": 2}
    assert all(math.isnan(part.speedup) for part in report.by_context.values())


@pytest.fixture(scope="module")
def two_turns(target, drafter):
    """Two turns, so long that contexts fall into two buckets."""
    dialogues = [*dialogues_of(3, turns=2, num_chat=1), dialogue(range(3, 63), turns=2, more=(5,) * 50)]
    return measured(target, drafter, dialogues, replace(QUICK, num_speed_prompts=None))


@pytest.mark.parametrize("kind", ["by_source", "by_turn", "by_context"])
def test_parts_add_up(two_turns, kind):
    parts = getattr(two_turns, kind)
    assert len(parts) == 2
    assert sum(part.rounds for part in parts.values()) == two_turns.rounds
    assert sum(part.tokens for part in parts.values()) == two_turns.tokens
    if kind != "by_context":
        assert sum(part.prompts for part in parts.values()) == two_turns.prompts == 8
        slowest, fastest = sorted(part.tokens_per_second for part in parts.values())
        assert slowest <= two_turns.tokens_per_second <= fastest
    for k in range(GAMMA):
        found = [part.acceptance_by_position[k] for part in parts.values()]
        assert min(found) <= two_turns.acceptance_by_position[k] <= max(found)


def test_contexts_are_counted_from_prompt_and_answer(target, drafter):
    """A prompt of 120 tokens: the first token of the answer is context too, and rounds of before 128 are apart."""
    found = measured(target, drafter, [dialogue([3, 4] * 60)], QUICK)
    (row,) = decode(target, drafter, [torch.tensor([3, 4] * 60)], DecodeConfig(max_new_tokens=24, stop_ids=()))
    below, place = 0, 121
    for one in row.rounds:
        below += one.full and place < 128
        place += one.gained
    assert found.by_context["0-127"].rounds == below > 0
    assert found.by_context["128-255"].rounds == found.rounds - below > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_later_turns_follow_the_first_contestants_answers(target, drafter, temperature):
    asked = []

    def watched(number):
        one = dialogues_of(3, turns=2)[number]
        return replace(one, encode=lambda answers: asked.append((number, list(answers))) or one.encode(answers))

    config = replace(QUICK, sampling=Sampling(temperature=temperature))
    both = {"first": drafter, "second": CopyDrafter(target, block_size=2)}
    reports = measured(target, both, [watched(i) for i in range(3)], config)
    for number in range(3):
        prompt = dialogues_of(3)[number].encode(())
        decoding = DecodeConfig(max_new_tokens=24, sampling=config.sampling, stop_ids=())
        (row,) = decode(target, drafter, [prompt], replace(decoding, numbers=(number,)))
        assert [answers for asks, answers in asked if asks == number] == [[], [row.tokens]]
    assert [part.prompts for part in reports["second"].by_turn.values()] == [3, 3]


def test_dialogues_without_a_next_turn_are_left_out_and_said(target, drafter):
    long = dialogue(range(3, 20), turns=3, more=(5,) * 460)
    refused = dialogue(range(5, 20), turns=2, refuses=True)
    with pytest.warns(UserWarning, match=r"prompts: turn 2 of 2 dialogues left out: longer than the 488 tokens"):
        found = measured(target, drafter, [*dialogues_of(3, turns=3), long, refused], QUICK)
    assert {turn: part.prompts for turn, part in found.by_turn.items()} == {"1": 5, "2": 3, "3": 3}


def acceptance_of(report):
    """All that a report says of acceptance."""
    parts = {}
    for kind in ("by_source", "by_turn", "by_context"):
        for name, part in getattr(report, kind).items():
            shared = [f.name for f in fields(part) if "second" not in f.name and f.name != "speedup"]
            # As text, in which NaN, the bounds of what one prompt says, equals NaN.
            parts[kind, name] = repr({name: getattr(part, name) for name in shared})
    names = ("accepted_length", "accepted_length_ci95", "acceptance_by_position", "acceptance_by_position_ci95")
    names += ("survival_by_position", "accepted_histogram", "verify_rate", "prompts", "rounds", "tokens", "per_prompt")
    return {**{name: getattr(report, name) for name in names}, "parts": parts}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, repetition_penalty=1.2)], ids=["0", "1"])
def test_acceptance_does_not_depend_on_the_batch(target, drafter, sampling):
    config = replace(QUICK, sampling=sampling, length=2, max_new_tokens=14)
    dialogues = dialogues_of(5, turns=2)
    one, *others = (measured(target, drafter, dialogues, replace(config, batch_size=n)) for n in (1, 2, 3))
    assert [report.batch_size for report in (one, *others)] == [1, 2, 3]
    for other in others:
        assert acceptance_of(other) == acceptance_of(one)
    assert one.draft_length == others[0].draft_length == 2


def test_sampled_measurements_are_seeded_and_claim_no_divergences(target, drafter):
    config = replace(QUICK, sampling=Sampling(temperature=1.0, top_k=9, top_p=0.95, min_p=0.01))
    first, second = (measured(target, drafter, dialogues_of(3), config) for _ in range(2))
    assert first.divergences is None
    assert acceptance_of(first) == acceptance_of(second)
    assert (first.temperature, first.top_k, first.top_p, first.min_p) == (1.0, 9, 0.95, 0.01)
    other = measured(target, drafter, dialogues_of(3), replace(config, seed=1))
    assert other.accepted_histogram != first.accepted_histogram


def test_progress_tells_the_running_accepted_length(target, drafter):
    seen = []
    report = measured(target, drafter, dialogues_of(3), QUICK, progress=lambda *told: seen.append(told))
    phases = [told[0] for told in seen]
    assert phases == sorted(phases, key=["acceptance", "costs", "speed"].index)
    told = [rest for phase, *rest in seen if phase == "acceptance"]
    assert [counts[:2] for counts in told] == [[1, 3], [2, 3], [3, 3]]
    assert told[-1][2] == pytest.approx(report.accepted_length)
    assert told[0][2] != told[-1][2]
    assert [rest[:2] for phase, *rest in seen if phase == "speed"] == [[1, 1]]
    assert all(done <= total for _, done, total, _ in seen)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"length": "best"}, "length"),
        ({"length": GAMMA + 1}, "length"),
        ({"length": 0}, "length"),
        ({"profile_rounds": 0}, "profile_rounds"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_new_tokens": 2}, "max_new_tokens: got 2; accepted: 5 or more"),
        ({"num_speed_prompts": 0}, "num_speed_prompts: got 0; accepted: 1 or more"),
        ({"sampling": Sampling(temperature=-1.0)}, "temperature: got -1.0"),
        ({"tree": [2, 2, 2, 2]}, r"tree: got \[2, 2, 2, 2\], of 4 levels; accepted: up to 3"),
        ({"tree": [2, 0]}, r"tree: got \[2, 0\]; accepted: a list of children"),
        ({"tree": "best"}, "tree: got 'best'; accepted: a list of children"),
        ({"tree": [2, 1], "length": 2}, "length: got 2 with a tree; accepted: auto"),
    ],
)
def test_bad_settings_are_named(target, drafter, changes, key):
    with pytest.raises(ConfigError, match=key):
        measured(target, drafter, dialogues_of(3), replace(CONFIG, **changes))


def test_no_prompts_is_an_error(target, drafter):
    with pytest.raises(DataError, match="prompts"):
        measured(target, drafter, [], CONFIG)


def test_first_difference_and_margin(target):
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    prompt = dialogues_of(2)[0].encode(())
    text = torch.cat([prompt, torch.tensor([7, 8])])
    last = target.states(text[None], needs=Needs(last=True)).last_BTD[0, -1:]
    best = target.head.logits(last)[0].sort(descending=True).values
    assert logit_margin(target, prompt, [7, 8]) == pytest.approx(float(best[0] - best[1]), rel=1e-4)


def test_divergences_are_found(target, drafter, monkeypatch):
    """A loop that changes one drafted text must show in the report, with its place and margin."""
    from drafters.decoding import runner as module

    honest = module.decode

    def lying(target, drafter, prompts, config, **rest):
        rows = honest(target, drafter, prompts, config, **rest)
        if drafter is not None and len(prompts[0]) == 5:
            rows[0].tokens[4] = 63 - rows[0].tokens[4]
        return rows

    monkeypatch.setattr(module, "decode", lying)
    found = measured(target, drafter, dialogues_of(3), CONFIG).divergences
    assert (found["prompts"], found["compared"]) == (1, 3)
    assert (found["first"][0]["prompt"], found["first"][0]["position"]) == (1, 4)
    assert found["first"][0]["logit_margin"] > 0


def test_dispatch_share_falls_when_the_arithmetic_grows():
    small = sharp_target(vocab_size=64, scale=1)
    large = sharp_target(vocab_size=64, scale=1, hidden_size=512, intermediate_size=2048)
    prompt = torch.arange(3, 9)
    assert dispatch_share(small, prompt) > dispatch_share(large, prompt) + 0.1


def test_every_number_follows_from_the_seconds(target, drafter, monkeypatch):
    """With made-up seconds the speed-up, its interval and the prediction can be told in advance."""
    one = steady(monkeypatch)
    report = measured(target, drafter, dialogues_of(4), replace(CONFIG, length=2))
    step, round_s = 20.5, 2 * 1 + 20 + 2 * 2 + 0.5
    assert report.baseline_step_ms == pytest.approx(step)
    assert (report.draft_ms, report.verify_ms, report.overhead_ms) == pytest.approx((2, 24, 0.5))
    assert report.verify_to_step == pytest.approx(24 / step)
    assert {cost.length: cost.verify_ms for cost in report.costs} == pytest.approx({1: 22, 2: 24, 3: 26})
    rounds = sum(len(one.rounds_of(drafter, number, length=2)) for number in range(4))
    assert report.baseline_tokens_per_second == pytest.approx(1e3 / step)
    assert report.speedup == pytest.approx(4 * 23 * step / (rounds * round_s), rel=0.05)
    assert report.end_to_end_speedup < report.speedup
    full = [r for number in range(4) for r in one.rounds_of(drafter, number) if r.full]
    tau = sum(min(r.accepted, 2) + 1 for r in full) / len(full)
    assert report.predicted_speedup == pytest.approx(step * tau / round_s)
    row = next(cost for cost in report.costs if cost.length == 2)
    assert row.single_steps_ms == pytest.approx(step * tau)
    assert row.accepted_length == pytest.approx(tau)


def scripted(monkeypatch, target, accepted, **changes):
    """The report of 25 tokens for each prompt, drafts of 3, with scripted acceptances."""
    monkeypatch.setattr("drafters.decoding.runner.decode", Scripted(accepted))
    config = replace(CONFIG, max_new_tokens=25, length=GAMMA, **changes)
    dialogues = [dialogue([3, 4, 5 + number]) for number in range(len(accepted))]
    return measured(target, CopyDrafter(target, block_size=GAMMA), dialogues, config)


GAIN = 20.5 / (3 * 1 + 20 + 3 * 2 + 0.5)  # a single step against a round of 3 drafts, of the seconds of Scripted


def test_the_speed_up_is_foretold_from_prompts_that_were_not_timed(target, monkeypatch):
    found = scripted(monkeypatch, target, [3, 3, 0, 0, 0], num_speed_prompts=2)
    assert found.accepted_length_at_draft_length == 4
    assert found.speedup == pytest.approx(4 * GAIN)
    assert found.prediction.accepted_length == pytest.approx(1)
    assert found.prediction.speedup == pytest.approx(1 * GAIN)
    assert found.prediction.error == pytest.approx(1 / 4 - 1)
    assert found.prediction.prompts == 3


def test_where_all_were_timed_each_half_foretells_the_other(target, monkeypatch):
    found = scripted(monkeypatch, target, [3, 1, 3, 0])
    # Full rounds: 6 of prompt 0 and of prompt 2; of 24 tokens in steps of 2 the last round has no room for 3 drafts,
    # and in steps of 1 the last three have none.
    from_odd, from_even = (11 * 2 + 21 * 1) / (11 + 21), 4.0
    assert found.prediction.accepted_length == pytest.approx(2 / (1 / from_odd + 1 / from_even))
    assert found.prediction.speedup == pytest.approx(2 / (1 / from_odd + 1 / from_even) * GAIN)
    assert found.prediction.prompts == 4
    assert found.predicted_speedup == pytest.approx((12 * 4 + 11 * 2 + 21) / (12 + 11 + 21) * GAIN)


def test_one_prompt_foretells_nothing(target, monkeypatch):
    found = scripted(monkeypatch, target, [3])
    assert found.speedup == pytest.approx(4 * GAIN)
    assert found.prediction.prompts == 0
    assert math.isnan(found.prediction.speedup)
    assert math.isnan(found.prediction.error)


def test_rounds_that_draft_less_than_asked_count_in_what_is_foretold(target, monkeypatch):
    """Prompt look-up often finds nothing: what stands when it finds something is not what a round gives."""
    one = steady(monkeypatch)
    ngram = NgramDrafter(NgramDrafter.Config(block_size=GAMMA), target.spec)
    found = measured(target, ngram, dialogues_of(4), CONFIG)
    full = [r for number in range(4) for r in one.rounds_of(ngram, number) if r.full]
    assert {r.proposed for r in full} >= {0, GAMMA}
    taus = {cost.length: cost.accepted_length for cost in found.costs}
    assert taus == pytest.approx({k: sum(min(r.accepted, k) + 1 for r in full) / len(full) for k in taus})


def test_a_fixed_tree(target, drafter):
    dialogues = dialogues_of(4)
    chain = measured(target, replace_block(drafter, 2), dialogues, QUICK)
    found = measured(target, drafter, dialogues, replace(CONFIG, tree=[2, 1]))
    assert found.tree == {"parents": [-1, -1, 0, 1], "ranks": [0, 1, 0, 0]}
    assert (found.block_size, found.draft_length) == (2, 4)
    assert len(found.acceptance_by_position) == len(found.acceptance_by_position_ci95) == 2
    assert len(found.accepted_histogram) == 3
    assert found.acceptance_by_position[0] > chain.acceptance_by_position[0]
    assert found.accepted_length == found.accepted_length_at_draft_length > chain.accepted_length
    assert [cost.length for cost in found.costs] == [4]
    assert found.costs[0].accepted_length == found.accepted_length
    assert found.divergences["prompts"] == 0
    assert min(found.draft_ms, found.verify_ms, found.predicted_speedup, found.prediction.speedup) > 0


def replace_block(drafter, block_size):
    """The same drafter with shorter blocks."""
    return CopyDrafter(drafter._copy, block_size=block_size)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chosen_tree_is_the_best_of_those_that_were_timed(target, drafter, monkeypatch, temperature):
    one = steady(monkeypatch)
    config = replace(CONFIG, tree="auto", sampling=Sampling(temperature=temperature), profile_rounds=2)
    found = measured(target, drafter, dialogues_of(3), config)
    size = len(found.tree["parents"])
    assert found.draft_length == size
    assert found.block_size == max(Tree(tuple(found.tree["parents"]), tuple(found.tree["ranks"])).depths) <= GAMMA
    timed = [cost.length for cost in found.costs]
    assert timed == [length for length in TREE_SIZES if length in timed]
    assert len(timed) >= 6
    chosen = next(cost for cost in found.costs if cost.length == size)
    assert chosen.accepted_length == found.accepted_length
    # A slot costs 3 ms of 20.5: in these seconds large trees do not pay.
    assert size <= 8
    drafted = [config.tree for who, numbers, config in one.calls if who is drafter and numbers is not None]
    assert all(tree is not None for tree in drafted)
    assert drafted[-1].size == size


@pytest.mark.parametrize("block_size", [1, 2])
def test_shallow_drafters_choose_among_the_trees_that_they_have(target, monkeypatch, block_size):
    steady(monkeypatch)
    found = measured(target, CopyDrafter(target, block_size=block_size), dialogues_of(2), replace(QUICK, tree="auto"))
    assert [cost.length for cost in found.costs] == {1: [4], 2: [4, 6, 8, 12, 16]}[block_size]
    assert found.block_size <= block_size


def test_a_tree_can_be_chosen_where_nothing_stands(target, monkeypatch):
    steady(monkeypatch)
    hopeless = CopyDrafter(target, block_size=GAMMA, support=torch.tensor([0, 1, 2, 3]))
    found = measured(target, hopeless, dialogues_of(2), replace(QUICK, tree="auto"))
    assert found.accepted_histogram[1:] == [0] * found.block_size


def test_contestants_without_trees_are_measured_with_chains(target, drafter):
    ngram = NgramDrafter(NgramDrafter.Config(block_size=2), target.spec)
    with pytest.warns(UserWarning, match="tree: look-up drafts no trees and is measured with chains"):
        found = measured(target, {"copy": drafter, "look-up": ngram}, dialogues_of(2), replace(QUICK, tree=[2, 1]))
    assert found["copy"].tree is not None
    assert found["look-up"].tree is None
    with pytest.raises(ConfigError, match=r"^tree: got 'auto', but one drafts no trees; accepted: null"):
        measured(target, ngram, dialogues_of(2), replace(QUICK, tree="auto"))
