"""A byte-level BPE tokenizer of 4,096 tokens, shared by target and draft."""

from __future__ import annotations

from pathlib import Path

from corpus import ASSISTANT, BOS, EOS, PAD, SPECIAL_TOKENS, USER, Document
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
CONTEXT_TOKENS = 512
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '" + USER + "' if message['role'] != 'assistant' else '" + ASSISTANT + "' }}{{ message['content'] | trim }}"
    "{% endfor %}{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def train_tokenizer(documents: list[Document]) -> PreTrainedTokenizerFast:
    """Train on each document once. Digits are split one by one, as in Llama, so that numbers have one spelling."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.text for d in documents), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[USER, ASSISTANT],
        model_max_length=CONTEXT_TOKENS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, *folders: Path) -> None:
    for folder in folders:
        tokenizer.save_pretrained(folder)
