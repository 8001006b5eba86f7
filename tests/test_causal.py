# Causal attention with a cache of its own equals attention over whole rows, whatever the rows read at a time.

import pytest
import torch

from drafters.heads.causal import CachedPass, causal_attention, own_cache

ROWS, WIDTH, HEADS, KV, SIZE = 3, 24, 4, 2, 6


@pytest.fixture
def heads():
    """Queries, keys and values of whole rows."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, WIDTH, n, SIZE, generator=generator) for n in (HEADS, KV, KV)]


def naive(query_BTNH, keys_BTKH, values_BTKH):
    """One query at a time."""
    out = torch.zeros(*query_BTNH.shape)
    for b in range(len(query_BTNH)):
        for t in range(query_BTNH.shape[1]):
            for n in range(HEADS):
                kv = n // (HEADS // KV)
                weights = (keys_BTKH[b, : t + 1, kv] @ query_BTNH[b, t, n]).softmax(0)
                out[b, t, n] = weights @ values_BTKH[b, : t + 1, kv]
    return out.flatten(2)


def test_whole_rows(heads):
    torch.testing.assert_close(causal_attention(*heads), naive(*heads), rtol=1e-4, atol=1e-5)


class Reader:
    """Rows that read their parts of `heads` in passes, row `rows[b]` from `at[b]` on."""

    def __init__(self, heads, rows):
        self.heads, self.rows, self.at = heads, list(rows), [0] * len(rows)
        self.cache = own_cache(len(self.rows), torch.device("cpu"))

    def read(self, counts, *, loud=False):
        """One pass; outputs [S, N * H] of each row."""
        index = torch.tensor(self.at)[:, None] + torch.arange(max(counts))
        rows = torch.tensor(self.rows)[:, None]
        parts = [x[rows, index.clamp(max=WIDTH - 1)] for x in self.heads]
        if loud:
            for part in parts:
                part[torch.arange(max(counts)) >= torch.tensor(counts)[:, None]] = 1e30
        run = CachedPass(self.cache, max(counts), torch.tensor(counts))
        assert [p[:c].tolist() for p, c in zip(run.positions_BS, counts, strict=True)] == [
            list(range(at, at + count)) for at, count in zip(self.at, counts, strict=True)
        ]
        out = run.attend(0, *parts)
        self.at = [at + count for at, count in zip(self.at, counts, strict=True)]
        return [out[b, :count] for b, count in enumerate(counts)]


def check(reader, whole, counts, **how):
    before = list(reader.at)
    for row, at, out in zip(reader.rows, before, reader.read(counts, **how), strict=True):
        torch.testing.assert_close(out, whole[row, at : at + len(out)], rtol=1e-4, atol=1e-5)


def test_ragged_reading_with_drafts_that_are_taken_back(heads):
    whole, reader = causal_attention(*heads), Reader(heads, range(ROWS))
    check(reader, whole, [3, 1, 5])
    check(reader, whole, [1, 4, 1])
    kept = list(reader.at)
    with reader.cache.draft():
        check(reader, whole, [2, 2, 2])
        check(reader, whole, [1, 1, 1])
    reader.at = kept
    check(reader, whole, [2, 1, 3])
    reader.cache.rollback(torch.tensor([4, 5, 9]))
    reader.at = [4, 5, 9]
    check(reader, whole, [1, 3, 2])
    reader.cache.keep(torch.tensor([2, 0]))
    reader.rows, reader.at = [2, 0], [reader.at[2], reader.at[0]]
    check(reader, whole, [3, 1])
    newcomer = Reader(heads, [1])
    check(newcomer, whole, [12])
    reader.cache.join(newcomer.cache)
    reader.rows, reader.at = reader.rows + newcomer.rows, reader.at + newcomer.at
    check(reader, whole, [1, 4, 2])


def test_padding_is_not_seen(heads):
    """Rows without anything valid give no NaN, and what padding holds spreads to nobody."""
    whole, reader = causal_attention(*heads), Reader(heads, range(ROWS))
    check(reader, whole, [0, 2, 4], loud=True)
    check(reader, whole, [3, 0, 1], loud=True)
    check(reader, whole, [2, 2, 2])


def test_a_row_of_padding_alone_stays_finite(heads):
    """Padding goes on to the next layer as keys and values, where a NaN would spread in spite of its weight of 0."""
    reader = Reader(heads, range(ROWS))
    run = CachedPass(reader.cache, 4, torch.tensor([0, 2, 4]))
    out = run.attend(0, *(x[:, :4] for x in heads))
    assert out.isfinite().all()
    # Where a slot sees nothing else it sees itself.
    torch.testing.assert_close(out[0].unflatten(-1, (HEADS, SIZE))[:, ::2], heads[2][0, :4])
