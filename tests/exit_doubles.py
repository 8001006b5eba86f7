# Early-exit drafters on tiny targets, the target's first layers as a model of their own, and rows of a target's cache
# that live as those of a batch do: they advance unevenly, leave and join.

import copy
from types import SimpleNamespace

import torch

from drafters.decoding.sampling import Draws, RowStreams
from drafters.heads.exit import AdapterConfig, ExitDrafter
from drafters.losses import LossWeights
from drafters.types import Sampling
from drafters.vocab import DraftVocab

EXIT = 2
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0)


def make_drafter(target, *, seed=0, reduced=False, **settings):
    """A drafter whose every part acts."""
    torch.manual_seed(seed)
    num_full = target.spec.vocab_size
    vocab = DraftVocab(torch.arange(0, num_full, 2), num_full=num_full) if reduced else None
    defaults = dict(exit_layer=EXIT, adapter=AdapterConfig(size=24), loss=LossWeights(ce=0.2, gamma=2.0, chunk=16))
    config = ExitDrafter.Config(**{**defaults, **settings}, draft_vocab_size=vocab.size if vocab else None)
    drafter = ExitDrafter(config, target.spec, vocab=vocab, gain_D=torch.rand(target.spec.hidden_size) + 0.5)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.uniform_(0.5, 1.5) if name.endswith("norm.weight") else parameter.normal_(std=0.3)
    return drafter


def layer_skip(target, exit_layer=EXIT, **settings):
    return ExitDrafter(ExitDrafter.Config(exit_layer=exit_layer, **settings), target.spec)


def shortened(target, exit_layer=EXIT):
    """The target's first layers as a model of transformers."""
    model = copy.deepcopy(target.model)
    decoder, num_layers = model.get_decoder(), exit_layer + 1
    decoder.layers = decoder.layers[:num_layers]
    decoder.config.num_hidden_layers = num_layers
    for layer in decoder.layers:
        layer._forward_hooks.clear()
        layer._forward_pre_hooks.clear()
    return model


def naive_logits(model, texts):
    """[B, V] after each text, by one uncached pass each."""
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([text]), use_cache=False).logits[0, -1].float() for text in texts])


def draws_of(sampling, num_rows):
    if sampling.temperature == 0:
        return Draws(sampling)
    return Draws(sampling, RowStreams(range(num_rows), torch.device("cpu")).round(4).draft_BS)


class World:
    """Rows of a target's cache and a session on it, driven by hand. `texts` end with the anchors."""

    def __init__(self, target, drafter, lengths, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.target, self.drafter, self.generator = target, drafter, generator
        rows = [torch.randint(3, 128, (n,), generator=generator) for n in lengths]
        self.cache, self.texts = target.new_cache(len(rows)), [row.tolist() for row in rows]
        self.session = drafter.session(target, len(rows))
        self.session.share(self.cache)
        self.read(self.texts, reject=0)

    def read(self, tokens, *, reject):
        """The target runs `tokens` and `reject` more a row, which are rolled back; new anchors."""
        lengths_B = torch.tensor([len(row) for row in tokens])
        fed = [torch.tensor([*row, *[7] * reject]) for row in tokens]
        tokens_BT = torch.nn.utils.rnn.pad_sequence(fed, batch_first=True)
        before_B = self.cache.lengths_B
        out = self.target.step(tokens_BT, self.cache, lengths_B=lengths_B + reject, needs=self.drafter.needs)
        self.cache.rollback(before_B + lengths_B)
        anchor_B = torch.randint(3, 128, (len(tokens),), generator=self.generator)
        self.session.extend(tokens_BT, lengths_B, anchor_B, out.aux_BSLD, out.last_BSD)
        self.texts = [[*text, anchor] for text, anchor in zip(self.texts, anchor_B.tolist(), strict=True)]

    def advance(self, counts, *, reject):
        """The anchors and `counts` - 1 more tokens stand."""
        more = [torch.randint(3, 128, (n - 1,), generator=self.generator).tolist() for n in counts]
        tokens = [[text[-1], *new] for text, new in zip(self.texts, more, strict=True)]
        self.texts = [[*text, *new] for text, new in zip(self.texts, more, strict=True)]
        self.read(tokens, reject=reject)

    def keep(self, rows):
        self.cache.keep(torch.tensor(rows))
        self.session.keep(torch.tensor(rows))
        self.texts = [self.texts[row] for row in rows]

    def join(self, other):
        self.cache.join(other.cache)
        self.session.join(other.session)
        self.session.share(self.cache)
        self.texts += other.texts

    def run(self, check):
        """`check(self)` after every step of a life with holes, rows that leave and rows that join."""
        for step in ([1, 3, 2], [4, 1, 1], "keep", [2, 3], [1, 4], "join", [1, 2, 5], [3, 1, 1]):
            if step == "keep":
                self.keep([2, 0])
            elif step == "join":
                self.join(World(self.target, self.drafter, [9], seed=1))
            else:
                self.advance(step, reject=1)
            check(self)


def world_of(target, drafter):
    return World(target, drafter, [12, 1, 5])


def photograph(cache):
    layers = [(layer.keys.clone(), layer.values.clone()) for layer in cache.hf.layers]
    return SimpleNamespace(lengths=cache.lengths_B, valid=cache.valid_BS, dense=cache.dense, layers=layers)


def assert_unchanged(cache, before):
    assert torch.equal(cache.lengths_B, before.lengths)
    assert torch.equal(cache.valid_BS, before.valid)
    assert cache.dense == before.dense
    assert len(cache.hf.layers) == len(before.layers)
    for layer, (keys, values) in zip(cache.hf.layers, before.layers, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


def fed(world, length):
    """Logits [B, G, V'] of a session that is given the true tokens from each row's anchor on."""
    anchors_BG = torch.tensor([text[-length:] for text in world.texts])
    with torch.inference_mode(), world.cache.draft():
        return torch.stack([world.session.next_logits(k, anchors_BG[:, k]) for k in range(length)], dim=1)
