"""A small real tokenizer, trained in code: byte-level BPE of a few hundred tokens, so that any text goes through."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<pad>", "<bos>", "<eos>", "<role>")
"""Ids 0 to 3."""

_CORPUS = (
    "A request is a list of tokens that wants more tokens. The model reads all of them and says what comes next.",
    "Blocks hold what was computed, so that nothing is computed twice; a table says which block belongs to which row.",
    "Many small rows share one step. The card that waits for another card does no work, and the reader waits as well.",
    "def step(rows: list[int]) -> int:\n    return sum(rows)\n\tfor row in rows:\n\t\tprint(row, 0.5, 1024)\n",
    "Ein Zug fährt über die Brücke. Le café est fermé à midi. Příliš žluťoučký kůň. 你好，世界。 今日は🙂🚀",
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<role>{{ message['role'] }}\n{{ message['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<role>assistant\n{% endif %}"
)


def write_tiny_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` with exactly `vocab_size` tokens (at least 260)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}; ask for 260 to 500")
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
