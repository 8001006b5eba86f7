# Is a confidence head calibrated, does it tell good drafts from bad? Teacher-forced, in validation, as histograms: sums
# that add up over batches and ranks, from which the error and the ROC-AUC of all of them follow. Labels are soft: the
# analytic acceptance rate 1 - TV, which is what the head is trained on.

import torch
from torch import Tensor

__all__ = ["ACCEPTANCE", "CONFIDENCE", "NUM_BINS", "auc_of", "ece_of", "histogram"]

NUM_BINS = 15  # of the calibration error, as after training
FINER = 20  # parts of such a bin: drafts whose confidences share one count as tied
CONFIDENCE, ACCEPTANCE = "confidence_bins", "acceptance_bins"

Pair = tuple[Tensor, Tensor]


def histogram(confidence_N: Tensor, accept_N: Tensor, *, slot_N: Tensor, num_slots: int) -> dict[str, Pair]:
    """(sum, count) pairs, float64 [G, 300], by position and bin of confidence: of the confidences under CONFIDENCE, of
    the acceptance rates under ACCEPTANCE. `slot_N`: the position of each draft, from 0. No gradient.

    Every draft counts, whatever came before it: with the true tokens before it, as in training.
    """
    confidence_N, accept_N = confidence_N.detach().double(), accept_N.detach().double()
    num_fine = NUM_BINS * FINER
    bin_N = (confidence_N * num_fine).long().clamp(0, num_fine - 1)
    place_N, size = slot_N * num_fine + bin_N, num_slots * num_fine

    def sums(values_N: Tensor) -> Tensor:
        return torch.bincount(place_N, weights=values_N, minlength=size).view(num_slots, num_fine)

    count_GB = sums(torch.ones_like(confidence_N))
    return {CONFIDENCE: (sums(confidence_N), count_GB), ACCEPTANCE: (sums(accept_N), count_GB)}


def ece_of(confidence: Pair, acceptance: Pair) -> Tensor:
    """Expected calibration error by position, [G]: the mean over drafts of |mean acceptance - mean confidence| of the
    draft's bin, 15 equal-width bins (1706.04599). NaN where there was no draft."""
    (confidence_GB, count_GB), (accept_GB, _) = confidence, acceptance
    gap_GB = (accept_GB - confidence_GB).unflatten(-1, (NUM_BINS, FINER)).sum(-1)
    return gap_GB.abs().sum(-1) / count_GB.sum(-1)


def auc_of(acceptance: Pair) -> Tensor:
    """ROC-AUC by position, [G]: the probability that an accepted draft has the higher confidence of a pair with a
    rejected one, ties counted half. NaN where all or none is accepted.

    A draft of acceptance a is accepted with weight a and rejected with weight 1 - a, so that even the true rates as
    confidences have an AUC below 1; it is what sampled outcomes would show.
    """
    accept_GB, count_GB = acceptance
    reject_GB = count_GB - accept_GB
    below_GB = reject_GB.cumsum(-1) - reject_GB
    pairs_G = accept_GB.sum(-1) * reject_GB.sum(-1)
    return (accept_GB * (below_GB + reject_GB / 2)).sum(-1) / pairs_G
