# The rows that a loss works on at once: the GPU's whole chunks give the CPU's numbers, and are bounded.

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from drafters import loss_chunks, loss_rows, losses, vocab_products
from drafters.loss_chunks import chunk_rows, scratch_rows
from drafters.losses import DistillInput, LossWeights, distill
from drafters.target import TargetHead
from drafters.vocab import DraftVocab
from tests.tiny import tiny_spec

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VOCAB, HIDDEN, RANK, ROWS = 509, 32, 8, 90


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=139 * 2**30))


def learned(dtype, *, reduced, weights):
    """Loss, acceptance, agreement and gradients of random rows."""
    torch.manual_seed(0)
    spec = replace(tiny_spec(), vocab_size=VOCAB, hidden_size=HIDDEN)
    weight_VD = (torch.randn(VOCAB, HIDDEN) / 3).to(dtype)
    head = TargetHead(spec, embedding_VD=weight_VD, lm_head_VD=weight_VD)
    vocab = DraftVocab(torch.arange(2, VOCAB, 3), num_full=VOCAB) if reduced else None
    target_MD, rows_N = torch.randn(40, HIDDEN).to(dtype), torch.randint(0, 40, (ROWS,)).sort().values
    leaves = [
        (target_MD[rows_N] + 0.4 * torch.randn(ROWS, HIDDEN).to(dtype)).requires_grad_(),
        torch.randn(ROWS, RANK).to(dtype).requires_grad_(),
        (0.3 * torch.randn(VOCAB if vocab is None else vocab.size, RANK)).requires_grad_(),
    ]
    inputs = DistillInput(
        hidden_ND=leaves[0],
        target_MD=target_MD,
        target_rows_N=rows_N,
        labels_N=torch.randint(0, VOCAB, (ROWS,)),
        weights_N=torch.rand(ROWS),
        lse_M=(target_MD.float() @ weight_VD.float().T).logsumexp(-1),
        bias_NR=leaves[1],
        bias_weight_VR=leaves[2],
        vocab=vocab,
    )
    found = distill(inputs, head, weights, want_metrics=True)
    return [found.total.detach(), found.accept_N, found.agree_N, *torch.autograd.grad(found.total, leaves)]


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("terms", [{"ce": 0.1, "l1": 0.9, "kl": 0.0}, {"ce": 0.3, "l1": 0.5, "kl": 0.7, "lk": 0.2}])
def test_rows_of_a_gpu_give_the_numbers_of_the_cpu(monkeypatch, h200, reduced, dtype, terms):
    weights, sizes = LossWeights(**terms), []

    def recorded(name, function, device):
        def rows(_, num_vocab):
            sizes.append((name, function(device, num_vocab)))
            return sizes[-1][1]

        for user in (losses, loss_rows, vocab_products):
            if hasattr(user, name):
                monkeypatch.setattr(user, name, rows)

    monkeypatch.setattr(loss_chunks, "CPU_ELEMENTS", 3 * VOCAB)
    monkeypatch.setattr(loss_chunks, "CPU_CHUNK", 16)
    found = []
    for device in (CPU, CUDA):
        recorded("chunk_rows", chunk_rows, device)
        recorded("scratch_rows", scratch_rows, device)
        found.append(learned(dtype, reduced=reduced, weights=weights))
    assert {size for name, size in sizes if name == "chunk_rows"} == {16, 8192}
    assert max(size for name, size in sizes if name == "scratch_rows") > ROWS
    one, other = found
    assert torch.equal(one[2], other[2])
    wide = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for mine, its in zip(one, other, strict=True):
        assert float((mine.double() - its.double()).norm()) <= wide * float(its.double().norm())


def test_rows_on_a_cpu_are_few():
    assert (chunk_rows(CPU, 151936), scratch_rows(CPU, 151936)) == (384, 3)
    assert scratch_rows(CPU, 10**9) == 1


def test_rows_on_a_gpu_are_many_and_bounded(monkeypatch, h200):
    assert (chunk_rows(CUDA, 151936), scratch_rows(CUDA, 151936)) == (1536, 441)
    assert chunk_rows(CUDA, 32000) == 8192
    assert chunk_rows(CUDA, 10) == 8192
    for num_vocab in (32000, 151936, 262144):
        assert scratch_rows(CUDA, num_vocab) * num_vocab * 4 <= 2**28
        assert chunk_rows(CUDA, num_vocab) * num_vocab * loss_chunks.BYTES <= 2 * 2**30
    # A card of 24 GB spares less, and never less than keeps a product busy.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=24 * 2**30))
    assert chunk_rows(CUDA, 151936) == 1280
    assert chunk_rows(CUDA, 10**7) == 256


def test_a_chunk_that_is_set_is_kept(monkeypatch):
    monkeypatch.setattr(losses, "chunk_rows", None)
    assert losses.LossWeights(chunk=7).chunk == 7
    learned(torch.float32, reduced=True, weights=LossWeights(chunk=7))
