# Tiny tokenizers with chat templates in the manner of well-known families, for tests of everything that reads chats.

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

__all__ = ["SPECIALS", "TEMPLATES", "tiny_tokenizer"]

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
        "{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "generation": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "<|begin_of_text|>{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + "
        "m.content | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
        "{% endif %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + "
        "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    # Strips the reasoning of all answers but the last, which always gets a (perhaps empty) block of it.
    "qwen3": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% set parts = m.content.split('</think>') %}{% if loop.last %}"
        "{{ '<think>\n' + (parts[0] | replace('<think>', '') | trim if parts | length > 1 else '') }}\n</think>\n\n"
        "{% endif %}{{ parts[-1] | trim }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}"
        "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
    "harmony": (
        "{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
        "{{ '<|message|>' + m.content + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    # No special token at all.
    "plain": (
        "{% for m in messages %}{{ m.role | upper + ':\n' + m.content + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
    ),
}

SPECIALS = [
    *("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
]

_TEXTS = [
    "What colour is the sky? Blue. And grass? Green! Be kind. user assistant system model\n\n\n",
    "The sky is blue, the grass is green.\n\nOnce upon a time there was a tool.\n",
]


def tiny_tokenizer(
    template: str | None, *, kind: str = "bytes", rstrip: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """A tokenizer with one of TEMPLATES (or None), trained on two strings. `kind` is "bytes" (byte-level BPE, as in
    GPT-2 and its heirs) or "spaces" (BPE on text whose spaces are ▁, as in SentencePiece). Special tokens in `rstrip`
    swallow the white space after them."""
    specials = [AddedToken(text, special=True, normalized=False, rstrip=text in rstrip) for text in SPECIALS]
    if kind == "bytes":
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        core = Tokenizer(models.BPE(unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        core.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = list("?.!,:\n\t/<>")
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(_TEXTS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=100_000
    )
    tokenizer.chat_template = TEMPLATES[template] if template else None
    return tokenizer
