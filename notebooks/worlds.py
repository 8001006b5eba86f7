# What the notebooks look at: the target, the drafter and the conversations of a run, or a tiny random target and a
# disturbed copy of it, made in seconds without a network. Texts of the tiny one mean nothing; the code is the same.

import logging
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # `data` is no installed package: it is used from the checkout

# Of progress bars in Jupyter without ipywidgets, and of DeepSpeed, where it is installed, without a GPU.
warnings.filterwarnings("ignore", "IProgress not found")
logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)

from data.sources import DataConfig, SourceConfig, load_splits  # noqa: E402
from drafters.chat import ChatEncoder  # noqa: E402
from drafters.door import door, load_target  # noqa: E402
from drafters.heads.base import Drafter  # noqa: E402
from drafters.heads.draft_model import DraftModel  # noqa: E402
from drafters.target import FrozenTarget  # noqa: E402
from drafters.types import Conversation  # noqa: E402

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["World", "open_world"]

SPECIALS = ("<|im_start|>", "<|im_end|>", "<pad>")
# The form of Qwen, SmolLM and many others.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LAYER_IDS = (0, 2)  # of the tiny target's four
SEED = 4  # of the tiny target: its texts repeat themselves less than others'
SHARP = 20.0  # times the logits of a random model: peaked, as those of trained ones are
NOISE, SURER = 0.18, 4.0  # of the copy: its disturbance, and its logits against the target's


@dataclass(frozen=True, kw_only=True)
class World:
    """`conversations` were not trained on; `layer_ids` are the target layers that are captured; `folder`: the run's,
    None for the tiny world."""

    target: FrozenTarget
    drafter: Drafter
    encoder: ChatEncoder
    conversations: list[Conversation]
    layer_ids: tuple[int, ...]
    folder: Path | None = None

    def prompts(self, count: int) -> list[Tensor]:
        """Token ids [T] of the first turns of so many conversations, each up to where the answer begins."""
        firsts = []
        for conversation in self.conversations[:count]:
            roles = [message.role for message in conversation.messages]
            firsts.append(self.encoder.prompt(conversation.messages[: roles.index("user") + 1]))
        return firsts


def open_world(run: str | None, *, dtype: str | None = None) -> World:
    """The world of a finished run, such as outputs/markov-smollm2 (from the root of the checkout), or the tiny one.

    `dtype`: of the run's target, such as "float32"; None = as in the run. The tiny one is in float32. What is
    wrong with a run is told in one line, and ends the cell.
    """
    with door():
        return _tiny_world() if run is None else _run_world(run, dtype)


def _run_world(run: str, dtype: str | None) -> World:
    from drafters.config import build_config, typed
    from drafters.contestants import find_entries, target_node

    (entry,) = find_entries([str(ROOT / run)], {}, key="RUN")
    assert entry.run is not None
    node, cwd = target_node([entry], None), entry.settings["cwd"]
    target = load_target(node if dtype is None else {**node, "dtype": dtype}, device=None)
    data = typed(DataConfig, entry.settings["data"], key="data")
    source: SourceConfig = build_config(entry.settings["source"], key="source")[1]
    _, held_out = load_splits(source.seen_from(cwd), validation=data.validation, seed=data.seed)
    return World(
        target=target,
        drafter=entry.load(target).drafter,
        encoder=ChatEncoder(target.tokenizer, max_length=data.max_length, template_kwargs=data.template_kwargs),
        conversations=held_out,
        layer_ids=tuple(node["layer_ids"]),
        folder=entry.run.folder,
    )


def _tiny_world() -> World:
    from transformers.utils.logging import disable_progress_bar

    source = SourceConfig(path=str(ROOT / "data/samples/conversations.jsonl.gz"), limit=80)
    conversations, _ = load_splits(source, validation=0.0, seed=0)
    tokenizer = _tokenizer(conversations)
    target = FrozenTarget.from_model(_model(len(tokenizer)), tokenizer=tokenizer, mask_token_id=2, name="tiny")
    copy = _model(len(tokenizer))
    # Not quite the target's mind, and surer of itself than it should be.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight = copy.lm_head.weight
        weight.add_(NOISE * weight.std() * torch.randn(weight.shape, generator=generator)).mul_(SURER)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        copy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        drafter = DraftModel(DraftModel.Config(weights=folder), target.spec)
        drafter.model(target)  # reads the folder, which does not stay
    encoder = ChatEncoder(tokenizer, max_length=512)
    return World(target=target, drafter=drafter, encoder=encoder, conversations=conversations, layer_ids=LAYER_IDS)


def _model(vocab_size: int) -> "LlamaForCausalLM":
    """A random Llama with peaked predictions, the same at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(config).eval().float()
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARP)
        model.lm_head.weight[[0, 2]] = 0.0  # it begins no turn, and pads nothing
    return model


def _tokenizer(conversations: list[Conversation]) -> "PreTrainedTokenizerFast":
    """Byte-level BPE, trained on these conversations."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        show_progress=False,
    )
    core.train_from_iterator((m.content for c in conversations for m in c.messages), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<pad>", model_max_length=1024
    )
    tokenizer.chat_template = CHATML
    return tokenizer
