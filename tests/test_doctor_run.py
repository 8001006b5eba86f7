# The doctor on a finished run: what it finds of the drafter and of its accepted length, each broken for real, and what
# it says where nothing is wrong.

import json
import math
import shutil

import pytest

from data.doctor import causes, drafter, text
from data.doctor.case import overlaid
from data.doctor.causes import TAU, TAU_GREEDY, Measured
from data.doctor.findings import Findings
from drafters.errors import CheckpointError
from drafters.target import FrozenTarget
from tests.doctor_cases import QUICK, case_of, copied, edit_config, edit_tensors, examined, flip, levels, the
from tests.door_world import contents, write_rows
from tests.tiny import tiny_llama
from tests.tiny_chat import TEMPLATES, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def own(first, tmp_path):
    """A copy of the run to break."""
    return copied(first, tmp_path)


@pytest.fixture
def target(world, tmp_path):
    """A copy of the target to break."""
    return shutil.copytree(world / "target", tmp_path / "target")


def test_a_whole_run(first, tmp_path, capsys):
    before = contents(first)
    found = examined(f"run={first}", "num_answers=2", "max_new_tokens=8", f"out={tmp_path}")
    assert contents(first) == before
    assert not found.has_problem
    passed = {one.check for one in found.all if one.level == "ok"}
    names = ("config", "weights", "layers", "target", "template", "dtype", "rope", "data", "report")
    assert passed >= {f"run/{name}" for name in names}
    assert passed >= {"acceptance/sampling", "cache/checksums", "cache/head", "target/self-check"}
    assert {one.check for one in found.all} >= {
        f"acceptance/{name}" for name in ("length", "gap", "training", "context")
    }
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert written["run"] == str(first)
    assert written["causes"] == [one.check for one in found.causes]
    screen = capsys.readouterr().out
    assert "low accepted length" in screen


def test_the_command_says_what_is_other_than_in_the_run(first):
    found = examined(f"run={first}", *QUICK, "target.dtype=bfloat16", "data.max_length=40")
    assert "in float32, this target computes in bfloat16" in the(found, "run/dtype", "warning").found
    assert "cut off at 40" in the(found, "text/truncated", "warning").found
    assert "other tokens" in the(found, "run/data", "note").found
    assert levels(found, "run/target") == ["ok"]


def test_overrides_lie_over_the_settings_of_a_run():
    nodes = {"target": {"a": 1, "b": {"c": 2, "d": 3}}, "source": {"x": 1}}
    given = {"target": {"a": 9, "b": {"c": 8}, "e": 7}, "source": {"y": 2}}

    def laid(*words):
        return overlaid(nodes, given, words)

    assert laid("run=x", "n=3") == nodes
    assert laid("target.a=9")["target"] == {"a": 9, "b": {"c": 2, "d": 3}}
    assert laid("+target.e=7", "target.b.c=8")["target"] == {"a": 1, "b": {"c": 8, "d": 3}, "e": 7}
    assert laid("~target.b.d")["target"] == {"a": 1, "b": {"c": 2}}
    assert laid("source=other")["source"] == {"y": 2}
    assert nodes["target"] == {"a": 1, "b": {"c": 2, "d": 3}}


def test_what_is_no_run_is_an_error_of_the_command(tmp_path):
    with pytest.raises(CheckpointError, match=r"run: .* is not a run of train\.py: it has no"):
        examined(f"run={tmp_path}", *QUICK)


def test_damaged_weights(own):
    flip(own / "drafter" / "model.safetensors")
    assert "the file is damaged" in the(examined(f"run={own}", *QUICK), "run/weights", "problem").found


def test_numbers_that_are_none(own):
    def change(tensors):
        name = min(name for name, one in tensors.items() if one.is_floating_point() and one.dim() == 2)
        tensors[name][0, 0] = math.nan

    edit_tensors(own, change)
    found = examined(f"run={own}", *QUICK)
    assert "1 numbers in 1 tensors are not finite" in the(found, "run/weights", "problem").found
    assert found.causes[0].check == "run/weights"
    assert "report.json is of other weights" in the(found, "run/report", "warning").found


def test_a_vocabulary_that_is_not_the_target_s(own):
    edit_tensors(own, lambda tensors: tensors["vocab.d2t"].add_(10_000))
    found = the(examined(f"run={own}", *QUICK), "run/weights", "problem").found
    assert "leave the target's vocabulary" in found


def test_a_vocabulary_that_lacks_tokens(first, own, world):
    """Another alphabet than the training's."""
    assert not [one for one in examined(f"run={first}", *QUICK).causes if one.check == "run/vocabulary"]
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "QZXJ #@%& 8642 ~~"}]}
        for i in range(6)
    ]
    path = write_rows(own / "rare.jsonl", rows)
    found = examined(f"run={first}", *QUICK, f"source.path={path}")
    lacking = the(found, "run/vocabulary", "warning")
    assert lacking.cost > 0.3
    assert "can never be drafted" in lacking.found
    assert lacking in found.causes


def test_stop_tokens_outside_the_vocabulary(own):
    edit_tensors(own, lambda tensors: tensors["vocab.d2t"].copy_(without(tensors["vocab.d2t"], 2)))
    assert "stop tokens [2]" in examined(f"run={own}", *QUICK).named("run/vocabulary")[0].found


def without(ids, token):
    """The same number of ids, ascending, without one of them."""
    kept = [one for one in ids.tolist() if one != token]
    spare = next(one for one in range(200) if one not in kept and one != token)
    return ids.new_tensor(sorted([*kept, spare])[: len(ids)])


def test_another_target(first, target):
    tiny_llama(seed=1, vocab_size=len(tiny_tokenizer("chatml"))).save_pretrained(target)
    found = examined(f"run={first}", *QUICK, f"target.weights={target}")
    assert "trained for weights" in the(found, "run/target", "problem").found
    assert [one.check for one in found.causes][:1] == ["run/target"]
    # Quantized, too.
    case = case_of(f"run={first}", *QUICK, f"target.weights={target}")
    assert text.check(case)
    case.target = FrozenTarget.load(str(target), dtype="float32", mask_token=0)
    case.target.model.config.quantization_config = {"quant_method": "fp8"}
    drafter.check(case)
    assert "quantized by fp8" in the(case.findings, "run/target", "problem").found
    tiny_llama(vocab_size=500).save_pretrained(target)
    found = examined(f"run={first}", *QUICK, f"target.weights={target}")
    assert "with vocab_size" in the(found, "run/target", "problem").found


def test_another_template(first, target):
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.chat_template = TEMPLATES["chatml"].replace("Be kind.", "Be brief.")
    tokenizer.save_pretrained(target)
    found = examined(f"run={first}", *QUICK, f"target.weights={target}")
    assert the(found, "run/template", "warning") in found.causes
    assert levels(found, "run/target") == ["ok"]


@pytest.mark.parametrize("shift", [0.0, 0.01])
def test_rope_of_the_training(own, shift):
    def change(config):
        config["target"]["rope_inv_freq"][0] += shift

    edit_config(own, change)
    assert levels(examined(f"run={own}", *QUICK), "run/rope") == (["problem"] if shift else ["ok"])


def test_layers_that_are_not_stored(own):
    def change(config):
        config["drafter"]["layer_ids"] = [0, 3]

    edit_config(own, change)
    assert "stores the layers [0, 2], not [3]" in the(examined(f"run={own}", *QUICK), "run/layers", "problem").found


def test_layers_that_the_target_has_not(own, target):
    edit_config(own, lambda config: config["drafter"].update(layer_ids=[0, 2]))
    tiny_llama(num_hidden_layers=2, vocab_size=len(tiny_tokenizer("chatml"))).save_pretrained(target)
    found = examined(f"run={own}", *QUICK, f"target.weights={target}", "target.layer_ids=[0,1]")
    assert "[2] are not there" in the(found, "run/layers", "problem").found


def test_windows_are_told(first, own):
    assert (
        "sees the last 64 positions, the target all"
        in the(examined(f"run={first}", *QUICK), "run/window", "note").found
    )
    edit_config(own, lambda config: config["drafter"].update(window=None))
    assert "sees all positions" in the(examined(f"run={own}", *QUICK), "run/window", "note").found


def test_reports(own):
    report = json.loads((own / "report.json").read_text())
    del report["by_context"]
    (own / "report.json").write_text(json.dumps(report))
    assert "of another version" in the(examined(f"run={own}", *QUICK), "acceptance/length", "problem").found
    (own / "report.json").write_text("{")
    assert "damaged" in the(examined(f"run={own}", *QUICK), "run/report", "problem").found
    (own / "report.json").unlink()
    shutil.rmtree(own / "logs")
    found = examined(f"run={own}", *QUICK)
    assert "no report.json" in the(found, "run/report", "warning").found
    assert levels(found, "acceptance/length") == ["note"]
    assert levels(found, "acceptance/training") == ["note"]


@pytest.mark.parametrize(
    ("file", "content", "check"),
    [
        ("target/config.json", b"{", "target/weights"),
        ("target/tokenizer.json", b"{", "target/weights"),
        ("outputs/first/drafter/config.json", b"[]", "run/config"),
        ("outputs/first/drafter/model.safetensors", b"xx", "run/weights"),
        ("outputs/first/report.json", b"[]", "run/report"),
        ("outputs/first/logs/version_0/metrics.csv", b"\x00\xff,a\n1,2\n", None),
        ("chats.jsonl", b"{]", "text/source"),
    ],
)
def test_a_damaged_file_is_a_finding(world, first, tmp_path, file, content, check):
    shutil.copytree(world, tmp_path / "own", dirs_exist_ok=True)
    run = tmp_path / "own" / "outputs" / "first"
    settings = run / ".hydra" / "settings.json"
    settings.write_text(settings.read_text().replace(str(world), str(tmp_path / "own")))
    (tmp_path / "own" / file).write_bytes(content)
    found = examined(f"run={run}", *QUICK)
    assert [one.check for one in found.all if one.level == "problem"][:1] == ([check] if check else [])


def measured(length, low=None, high=None, *, temperature=0.0, rounds=500, contexts=()):
    ends = (length if low is None else low, length if high is None else high)
    values = {"block_size": 7, "temperature": temperature}
    parts = {
        name: Measured(accepted_length=tau, accepted_length_ci95=ends, prompts=9, rounds=rounds, **values)
        for name, tau, ends, rounds in contexts
    }
    return Measured(
        accepted_length=length, accepted_length_ci95=ends, prompts=9, rounds=rounds, by_context=parts, **values
    )


def judged(check, *given):
    findings = Findings()
    check(findings, *given)
    (one,) = findings.all
    return one


def test_teacher_forced_against_decoded():
    gap = judged(causes.check_gap, measured(1.5, 1.4, 1.6), {TAU_GREEDY: 2.0, TAU: 1.5})
    assert (gap.level, gap.is_cause, gap.cost) == ("warning", True, pytest.approx(0.5))
    assert "another chat template" in gap.advice
    assert "ruled out" not in gap.advice
    findings = Findings()
    findings.ok("run/template", "the same")
    findings.ok("run/dtype", "the same")
    findings.warning("run/dtype", "another", "use it")
    causes.check_gap(findings, measured(1.5, 1.4, 1.6), {TAU_GREEDY: 2.0})
    advice = findings.all[-1].advice
    assert "another chat template" not in advice
    assert "states of another dtype" in advice
    assert "1 others are ruled out" in advice
    unsure = judged(causes.check_gap, measured(1.5, 1.1, 1.9), {TAU_GREEDY: 2.0})
    assert (unsure.level, unsure.is_cause) == ("note", False)
    assert judged(causes.check_gap, measured(1.9, 1.85, 1.95), {TAU_GREEDY: 2.0}).level == "ok"
    assert judged(causes.check_gap, measured(1.5, 1.4, 1.6, temperature=1.0), {TAU_GREEDY: 2.0, TAU: 1.5}).level == "ok"
    assert judged(causes.check_gap, measured(1.05), {TAU_GREEDY: 1.1}).level == "note"
    assert judged(causes.check_gap, measured(1.5), {}).level == "note"
    assert causes._numbers({TAU: 2, "a": "x", "b": None}) == {TAU: 2.0}
    assert causes._numbers("x") == {}
    assert judged(causes.check_gap, measured(1.5, math.nan, math.nan), {TAU_GREEDY: 2.0}).level == "note"


def test_sampling():
    drawn = measured(1.5, temperature=1.0)
    assert judged(causes.check_sampling, measured(1.5), {}).level == "ok"
    lost = judged(causes.check_sampling, drawn, {TAU_GREEDY: 2.0, TAU: 1.6})
    assert (lost.level, lost.cost) == ("warning", pytest.approx(0.4))
    assert judged(causes.check_sampling, drawn, {TAU_GREEDY: 2.0, TAU: 1.95}).level == "ok"
    assert judged(causes.check_sampling, drawn, {}).level == "note"


def test_context():
    short = ("0-127", 2.0, (1.9, 2.1), 300)
    long = judged(causes.check_context, measured(1.8, contexts=[short, ("128-255", 1.4, (1.3, 1.5), 100)]), [90, 120])
    assert (long.level, long.cost) == ("warning", pytest.approx(0.6 * 0.25))
    assert "the longest of the training texts has 120 tokens" in long.found
    for other, level in ((("128-255", 1.4, (1.0, 1.95), 100), "ok"), (("128-255", 1.9, (1.8, 1.85), 100), "ok")):
        assert judged(causes.check_context, measured(1.8, contexts=[short, other]), []).level == level
    few = measured(1.8, contexts=[short, ("128-255", 1.4, (1.3, 1.5), 29)])
    assert judged(causes.check_context, few, []).level == "note"


def log(*taus, rate=lambda step: 1.0, step=100):
    """Validations each `step` steps, with these accepted lengths, and the learning rates between."""
    rows = []
    for number, tau in enumerate(taus, start=1):
        at = number * step - 1.0
        rows.append({"step": at, "train/lr": rate(at), "epoch": float(number // 2)})
        rows.append({"step": at, "positions": number * 1000.0, TAU: tau})
    return rows


def test_training_that_was_too_short():
    doubling = [1 + 0.1 * math.log2(number) + 0.5 for number in range(1, 9)]
    rising = judged(causes.check_training, log(*doubling), 5000)
    gain = 0.1 / (doubling[-1] - 1)
    assert (rising.level, rising.cost) == ("warning", pytest.approx(gain / (1 + gain)))
    assert "8,000 draft positions in 800 steps, 4 whole passes over the data (5,000 supervised tokens)" in rising.found
    assert judged(causes.check_training, log(*[1.8] * 8), None).level == "ok"
    falls = log(*doubling, rate=lambda step: 1.0 if step < 250 else 0.5)
    assert (judged(causes.check_training, falls, None).level, causes.gain_of_doubling(falls, falls[1::2])) == (
        "note",
        None,
    )
    late = log(*doubling[:6], 1.9, 2.4, rate=lambda step: 1.0 if step < 600 else 0.1)
    assert causes.gain_of_doubling(late, late[1::2]) == pytest.approx(0.1 / (doubling[5] - 1))
    assert judged(causes.check_training, log(1.5), None).found.count("less than one pass") == 1
    assert judged(causes.check_training, [], None).level == "note"


def test_training_that_went_too_far():
    falling = judged(causes.check_training, log(1.5, 1.9, 2.0, 1.8), None)
    assert (falling.level, falling.cost) == ("warning", pytest.approx(0.2))
    assert "not more passes" in falling.advice


def test_causes_are_ranked():
    findings = Findings()
    findings.warning("acceptance/gap", "a", "b", cost=0.2)
    findings.warning("text/mask", "a", "b")
    findings.warning("run/vocabulary", "a", "b", cost=0.4)
    findings.problem("run/target", "a", is_cause=True)
    assert [one.check for one in findings.causes] == ["run/target", "run/vocabulary", "acceptance/gap"]
    texts = [str(part) for part in findings.render()]
    assert "1. run/target: not known" in texts[-2]
    assert "3. acceptance/gap: about 20%" in texts[-2]
    nothing = Findings()
    nothing.ok("acceptance/gap", "a")
    assert any("none found" in str(part) for part in nothing.render())
