"""Between text and tokens: tokenizer, chat template, detokenizer. Torch-free."""
