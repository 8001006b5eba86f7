# Calibration: what was bent is bent back, one position after the other; the file is checked; the fits equal naive ones.

import json
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torchmetrics.functional.classification import binary_calibration_error

from drafters.errors import CheckpointError, ConfigError
from drafters.plain_json import unsealed
from drafters.scheduling.calibration import (
    METHODS,
    Calibration,
    bins_of,
    calibration_error,
    confidence_logit,
    fit,
    identity,
)
from drafters.scheduling.observations import Observations
from drafters.types import Sampling

FITTED = {"sampling": Sampling(temperature=1.0), "drafter_sha256": "d" * 64, "target_hash": "t" * 64}


def drawn(*curves, seed, num_rounds=20000, num_prompts=50, shortest=None):
    """Rounds whose draft k stands with probability sigmoid((logit(c_k) + s_k log(c_k (1 - c_k))) / T_k + b_k); c
    depends on a common ease. `curves` are T, b and s; no s are zeros."""
    generator = torch.Generator().manual_seed(seed)
    num_slots = len(curves[0])
    temperatures, biases, skews = (*curves, (0.0,) * num_slots)[:3]
    ease_N1 = torch.randn((num_rounds, 1), generator=generator, dtype=torch.float64)
    noise_NG = torch.randn((num_rounds, num_slots), generator=generator, dtype=torch.float64)
    logit_NG = 0.7 + 1.2 * ease_N1 + noise_NG
    spread_NG = (logit_NG.sigmoid() * (-logit_NG).sigmoid()).log()
    bent_NG = logit_NG + torch.tensor(skews) * spread_NG
    true_NG = torch.sigmoid(bent_NG / torch.tensor(temperatures) + torch.tensor(biases))
    stands_NG = torch.rand(true_NG.shape, generator=generator, dtype=torch.float64) < true_NG
    low = num_slots if shortest is None else shortest
    proposed_N = torch.randint(low, num_slots + 1, (num_rounds,), generator=generator)
    counted_NG = torch.arange(num_slots) < proposed_N[:, None]
    return Observations(
        confidence_NG=logit_NG.sigmoid().masked_fill(~counted_NG, math.nan),
        likeliest_NG=torch.full_like(logit_NG, 0.5).masked_fill(~counted_NG, math.nan),
        accepted_N=(stands_NG & counted_NG).long().cumprod(1).sum(1),
        proposed_N=proposed_N,
        prompt_N=torch.arange(num_rounds) * num_prompts // num_rounds,
        context_N=torch.arange(num_rounds),
    )


def calibrated(temperatures, biases=None, skews=None, *, method="temperature"):
    zeros = (0.0,) * len(temperatures)
    return Calibration(temperatures=temperatures, biases=biases or zeros, skews=skews or zeros, method=method, **FITTED)


def plain_error(probabilities, labels, num_bins=15):
    """The expected calibration error by the book."""
    total = 0.0
    for b in range(num_bins):
        inside = [i for i, p in enumerate(probabilities) if min(int(p * num_bins), num_bins - 1) == b]
        if inside:
            share = sum(labels[i] for i in inside) / len(inside)
            mean = sum(probabilities[i] for i in inside) / len(inside)
            total += len(inside) / len(probabilities) * abs(share - mean)
    return total


def test_apply_is_a_temperature_and_a_bias_a_position():
    confidence_BS = torch.tensor([[0.5, 0.9], [0.2, 0.9]], dtype=torch.float64)
    found_BS = calibrated((2.0, 0.5, 1.0), (0.0, 1.0, 0.0), method="affine").apply(confidence_BS)
    expected = [[0.5, 1 / (1 + math.exp(-(math.log(9) * 2 + 1)))], [1 / (1 + 4**0.5), 0.0]]
    expected[1][1] = expected[0][1]
    assert found_BS.tolist() == [pytest.approx(row) for row in expected]


def test_survival_is_the_product():
    confidence_BS = torch.rand((5, 3), generator=torch.Generator().manual_seed(0))
    one = calibrated((2.0, 0.5, 1.5))
    applied = one.apply(confidence_BS)
    survival_BS = one.survival(confidence_BS)
    for k in range(3):
        torch.testing.assert_close(survival_BS[:, k], applied[:, : k + 1].prod(1))


def test_order_at_a_position_stays_and_no_position_sees_another():
    confidence_BS = torch.linspace(0, 1, 101, dtype=torch.float64)[:, None].expand(101, 3).clone()
    one = calibrated((0.3, 1.0, 4.0), (0.5, -1.0, 0.0), method="affine")
    before_BS = one.apply(confidence_BS)
    assert (before_BS.diff(dim=0) > 0).all()
    confidence_BS[:, 1] = 0.123
    after_BS = one.apply(confidence_BS)
    assert torch.equal(after_BS[:, [0, 2]], before_BS[:, [0, 2]])
    assert not torch.equal(after_BS[:, 1], before_BS[:, 1])
    assert torch.equal(one.survival(confidence_BS)[:, 0], before_BS[:, 0])


def test_certain_confidences_stay_finite_and_nan_stays():
    one = calibrated((0.5, 2.0))
    found_BS = one.apply(torch.tensor([[0.0, 1.0], [1.0, math.nan]]))
    assert found_BS.dtype == torch.float32
    assert ((found_BS >= 0) & (found_BS <= 1)).flatten().tolist() == [True, True, True, False]
    assert found_BS[1, 1].isnan()
    assert confidence_logit(torch.tensor([0.0, 1.0], dtype=torch.float64)).abs().max() < 14
    assert one.apply(torch.tensor([[0.5, 0.25]], dtype=torch.bfloat16)).dtype == torch.float32


def test_identity_changes_nothing():
    confidence_BS = torch.tensor([[0.0, 1.0, 1e-9, 0.3]])
    one = identity(4, **FITTED)
    assert torch.equal(one.apply(confidence_BS), confidence_BS)
    torch.testing.assert_close(one.survival(confidence_BS), confidence_BS.cumprod(1))


def test_fewer_slots_are_fine_and_more_are_refused():
    one = calibrated((2.0, 3.0))
    assert one.apply(torch.rand(4, 1)).shape == (4, 1)
    assert one.apply(torch.rand(4, 0)).shape == (4, 0)
    with pytest.raises(CheckpointError, match="fitted for 2 drafts, used for 3"):
        one.apply(torch.rand(4, 3))


@pytest.mark.parametrize("seed", range(10))
def test_calibration_error_equals_the_book_s_and_the_library_s(seed):
    generator = torch.Generator().manual_seed(seed)
    probability_N = torch.rand(200, generator=generator, dtype=torch.float64) ** (seed / 3 + 0.3)
    label_N = torch.rand(200, generator=generator) < 0.6
    error = calibration_error(probability_N, label_N)
    assert error == pytest.approx(plain_error(probability_N.tolist(), label_N.tolist()), abs=1e-12)
    theirs = binary_calibration_error(probability_N.float(), label_N.long(), n_bins=15, norm="l1")
    assert error == pytest.approx(float(theirs), abs=1e-5)


def test_bins_hold_their_ends():
    assert bins_of(torch.tensor([0.0, 1.0, 0.999, 1 / 15 + 1e-6, 1 / 15 - 1e-6])).tolist() == [0, 14, 14, 1, 0]
    assert math.isnan(calibration_error(torch.zeros(0), torch.zeros(0)))


@pytest.mark.parametrize("seed", range(3))
def test_known_temperatures_come_back(seed):
    true = (2.0, 0.6, 1.5, 1.0)
    temperatures, biases, skews = fit(drawn(true, (0.0,) * 4, seed=seed), method="temperature")
    assert biases == skews == (0.0,) * 4
    for found, expected in zip(temperatures, true, strict=True):
        assert found == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_known_temperatures_and_biases_come_back(seed):
    true, shift = (2.0, 0.6, 1.5, 1.0), (-0.5, 0.8, 0.0, 0.3)
    temperatures, biases, skews = fit(drawn(true, shift, seed=seed), method="affine")
    assert temperatures == pytest.approx(true, rel=0.12)
    assert biases == pytest.approx(shift, abs=0.12)
    assert skews == (0.0,) * 4


@pytest.mark.parametrize("seed", range(3))
def test_known_curves_come_back(seed):
    true = (2.0, 0.6, 1.5), (-0.5, 0.8, 0.3), (0.6, -0.5, 0.0)
    found = fit(drawn(*true, seed=seed, num_rounds=60000), method="beta")
    confidence_BS = torch.linspace(0.1, 0.9, 17, dtype=torch.float64)[:, None].expand(-1, 3)
    mine_BS, true_BS = (calibrated(*curves, method="beta").apply(confidence_BS) for curves in (found, true))
    assert (mine_BS - true_BS).abs().max() < 0.06
    assert found.skews[0] == pytest.approx(0.6, abs=0.15)


def test_a_skewed_curve_is_beta_calibration():
    """The definition of Kull, Silva Filho and Flach: 1 / (1 + 1 / (e^d c^a / (1 - c)^b))."""
    confidence_BS = torch.rand(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found_BS = calibrated((2.0, 0.5), (0.3, -1.0), (0.4, -0.7), method="beta").apply(confidence_BS)
    for k, (t, d, s) in enumerate([(2.0, 0.3, 0.4), (0.5, -1.0, -0.7)]):
        a, b, c_B = (1 + s) / t, (1 - s) / t, confidence_BS[:, k]
        plain_B = 1 / (1 + 1 / (math.exp(d) * c_B**a / (1 - c_B) ** b))
        assert torch.allclose(found_BS[:, k], plain_B, atol=1e-12)


@pytest.mark.parametrize("skew", [-1.0, -0.5, 0.5, 1.0])
def test_no_curve_changes_the_order(skew):
    confidence_B1 = torch.linspace(0, 1, 1001, dtype=torch.float64)[:, None]
    found_B = calibrated((1.5,), (0.2,), (skew,), method="beta").apply(confidence_B1)[:, 0]
    assert (found_B.diff() >= 0).all()
    assert (found_B.diff() > 0).sum() > 900


@pytest.mark.parametrize("method", METHODS)
def test_fitted_confidences_tell_the_truth_on_other_rounds(method):
    true, shift = (3.0, 2.5, 0.5), (0.0, 0.0, 0.0)
    fitted = calibrated(*fit(drawn(true, shift, seed=0, shortest=1), method=method), method=method)
    other = drawn(true, shift, seed=1, shortest=1)
    for k in range(3):
        kept_N = other.counted_NG[:, k]
        raw = calibration_error(other.confidence_NG.cumprod(1)[kept_N, k], other.survived_NG[kept_N, k])
        found = calibration_error(fitted.survival(other.confidence_NG)[kept_N, k], other.survived_NG[kept_N, k])
        assert found < 0.015 < 0.05 < raw


def test_a_bias_repairs_what_a_temperature_cannot():
    seen = drawn((1.0,), (1.5,), seed=0)
    errors = {}
    for method in METHODS:
        found = calibrated(*fit(seen, method=method), method=method).survival(seen.confidence_NG)[:, 0]
        errors[method] = calibration_error(found, seen.survived_NG[:, 0])
    assert max(errors["affine"], errors["beta"]) < 0.02 < errors["temperature"]


def test_a_skew_repairs_what_a_bias_cannot():
    seen = drawn((0.5,), (0.0,), (0.9,), seed=0)
    errors = {}
    for method in METHODS:
        found = calibrated(*fit(seen, method=method), method=method).survival(seen.confidence_NG)[:, 0]
        errors[method] = calibration_error(found, seen.survived_NG[:, 0])
    assert errors["beta"] < 0.012 < min(errors["affine"], errors["temperature"])


def test_temperatures_are_the_best_of_a_plain_search_left_to_right():
    """On another grid than the fit's: nothing found there is better by more than a step of the error."""
    seen = drawn((2.0, 0.7, 1.4), (0.2, 0.0, -0.3), seed=5, num_rounds=600, shortest=0)
    temperatures = fit(seen, method="temperature").temperatures
    for k in range(3):
        kept_N = seen.counted_NG[:, k]
        label = seen.survived_NG[kept_N, k]

        def error(t, *, k=k, kept_N=kept_N, label=label):
            one = calibrated((*temperatures[:k], t))
            return calibration_error(one.survival(seen.confidence_NG[:, : k + 1])[kept_N, k], label)

        plain = min(error(math.exp(-3 + 6 * i / 150)) for i in range(151))
        assert error(temperatures[k]) <= plain + 0.003


@pytest.mark.parametrize("method", ["affine", "beta"])
def test_curves_are_the_minimum_of_the_log_loss_of_the_product(method):
    seen = drawn((2.0, 0.7, 1.4), (0.2, 0.0, -0.3), (0.3, 0.0, -0.4), seed=5, num_rounds=600, shortest=0)
    curves = fit(seen, method=method)
    free = 3 if method == "beta" else 2
    spread_NG = (seen.confidence_NG * (1 - seen.confidence_NG)).log()
    before_N = torch.ones(seen.num_rounds, dtype=torch.float64)

    def stands(x, k):
        bent_N = torch.logit(seen.confidence_NG[:, k]) + (x[2] if len(x) > 2 else 0.0) * spread_NG[:, k]
        return torch.sigmoid(bent_N / math.exp(x[0]) + x[1])

    for k in range(3):
        kept_N = seen.counted_NG[:, k]

        def loss(x, *, k=k, kept_N=kept_N, before_N=before_N):
            label_N = seen.survived_NG[kept_N, k].double()
            entropy = F.binary_cross_entropy((before_N * stands(x, k))[kept_N], label_N, reduction="sum")
            return float(entropy) + 0.5 * sum(value**2 for value in x)

        settings = {"xatol": 1e-8, "fatol": 1e-11, "maxiter": 5000, "maxfev": 5000}
        found = minimize(
            loss, [0.0] * free, method="Nelder-Mead", options=settings, bounds=[(-3, 3)] * 2 + [(-1, 1)] * (free - 2)
        )
        mine = [math.log(curves.temperatures[k]), curves.biases[k], curves.skews[k]]
        assert mine[:free] == pytest.approx(found.x.tolist(), abs=2e-4)
        before_N = before_N * stands(mine, k)


def few(confidences, accepted, proposed=None):
    confidence_NG = torch.tensor(confidences, dtype=torch.float64)
    num_rounds, num_slots = confidence_NG.shape
    return Observations(
        confidence_NG=confidence_NG,
        likeliest_NG=confidence_NG,
        accepted_N=torch.tensor(accepted),
        proposed_N=torch.full((num_rounds,), num_slots) if proposed is None else torch.tensor(proposed),
        prompt_N=torch.arange(num_rounds),
        context_N=torch.arange(num_rounds),
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_position_that_nothing_reached_is_as_the_one_before(method):
    curves = fit(few([[0.9, 0.5, 0.5]] * 20, [0] * 14 + [1] * 6), method=method)
    assert curves.temperatures[0] != 1.0
    # Six rounds reached the second draft, none the third.
    assert all(values[2] == values[1] for values in curves)
    assert (
        fit(few([[0.9, 0.5]] * 20, [0] * 20), method=method)[0][1]
        == fit(few([[0.9]] * 20, [0] * 20), method=method)[0][0]
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_that_never_proposed_so_far_is_left_alone(method):
    nan = math.nan
    assert fit(few([[nan, nan]] * 3, [0] * 3, [0] * 3), method=method) == ((1.0, 1.0), (0.0, 0.0), (0.0, 0.0))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("accepted", [0, 2])
@pytest.mark.parametrize("confidence", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_extremes_give_finite_values_that_go_the_right_way(method, accepted, confidence):
    seen = few([[confidence] * 2] * 30, [accepted] * 30)
    one = calibrated(*fit(seen, method=method), method=method)
    assert all(1 / 21 < t < 21 for t in one.temperatures)
    before, after = seen.confidence_NG[0, 0], one.apply(seen.confidence_NG)[0, 0]
    assert after <= before + 1e-5 if accepted == 0 else after >= before - 1e-5


def test_a_temperature_is_found_to_a_thousandth():
    seen = few([[0.9]] * 1000, [1] * 627 + [0] * 373)
    temperatures = fit(seen, method="temperature").temperatures
    assert temperatures[0] == pytest.approx(math.log(9) / math.log(627 / 373), rel=1e-3)


def test_of_equal_temperatures_the_nearest_to_one_is_taken():
    assert fit(few([[0.5]] * 9, [1] * 5 + [0] * 4), method="temperature")[0] == (1.0,)


def test_fits_do_not_mind_inference_mode():
    with torch.inference_mode():
        seen = drawn((2.0, 0.7), (0.2, 0.0), seed=5, num_rounds=100)
        inside = {method: fit(seen, method=method) for method in METHODS}
    assert inside == {method: fit(seen, method=method) for method in METHODS}


def test_few_rounds_move_an_affine_fit_little():
    assert 0.1 < fit(few([[0.5]], [1]), method="affine").biases[0] < 1.0


def test_an_unknown_method_is_refused():
    with pytest.raises(ConfigError, match="got 'platt'; accepted: temperature, affine, beta"):
        fit(few([[0.5]], [1]), method="platt")


def test_the_file_gives_back_the_same(tmp_path):
    one = Calibration(
        temperatures=(1.25, 0.1 + 0.2),
        biases=(0.0, -1e-3),
        skews=(-1.0, 0.3),
        method="beta",
        sampling=Sampling(temperature=0.7, top_k=20),
        drafter_sha256="d",
        target_hash="t",
        provenance={"rounds": 812, "sources": ["chat"]},
    )
    path = one.save(tmp_path)
    assert path == tmp_path / "calibration.json"
    assert one.save(tmp_path) == path
    assert Calibration.load(tmp_path) == one
    assert [p.name for p in tmp_path.iterdir()] == ["calibration.json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "schema is 2; this version reads 3"),
        ({"temperatures": [1.0]}, "1 temperatures, 2 biases and 2 skews"),
        ({"temperatures": [1.0, 0.0]}, "numbers above 0"),
        ({"temperatures": [1.0, "hot"]}, "damaged: ValueError"),
        ({"temperatures": None}, "damaged: TypeError"),
        ({"biases": [0.0, 1.0]}, "biases are .* accepted: 0 with method 'temperature'"),
        ({"skews": [0.0, 0.1]}, "skews are .* accepted: 0 with method 'temperature'"),
        ({"skews": [0.0, 1.1], "method": "beta"}, "skews are .* accepted: numbers from -1 to 1"),
        ({"method": "platt"}, "accepted: identity, temperature, affine, beta"),
        ({"method": "identity"}, "accepted: 1 with method 'identity'"),
        ({"sampling": {"heat": 1.0}}, "damaged: TypeError .*heat"),
        ({"extra": 1}, "damaged: TypeError .*extra"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, change, said):
    path = calibrated((2.0, 1.5)).save(tmp_path)
    path.write_text(json.dumps(unsealed(json.loads(path.read_text())) | change))
    with pytest.raises(CheckpointError, match=rf"{path}.*{said}[^=]*task=calibrate[^=]*$"):
        Calibration.load(tmp_path)


def test_a_missing_or_cut_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such file; run task=calibrate"):
        Calibration.load(tmp_path)
    path = calibrated((2.0,)).save(tmp_path)
    path.write_text(path.read_text()[:30])
    with pytest.raises(CheckpointError, match="cannot be read"):
        Calibration.load(tmp_path)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="schema is None"):
        Calibration.load(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be written"):
        calibrated((2.0,)).save(tmp_path / "none")


def test_other_weights_are_refused_and_another_sampling_warns_of_both():
    one = calibrated((2.0,))
    same = {"drafter_sha256": "d" * 64, "target_hash": "t" * 64}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.check(Sampling(temperature=1.0), **same)
    with pytest.raises(CheckpointError, match="a drafter with weights dddddddddddd, this one has e"):
        one.check(Sampling(temperature=1.0), **same | {"drafter_sha256": "e" * 64})
    with pytest.raises(CheckpointError, match="a target with weights"):
        one.check(Sampling(temperature=1.0), **same | {"target_hash": "e" * 64})
    with pytest.warns(UserWarning, match="fitted at temperature=1, top_k=0, used at temperature=0, top_k=5"):
        one.check(Sampling(temperature=0.0, top_k=5), **same)
