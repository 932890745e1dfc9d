"""Text <-> token ids: loading and building tokenizers, chat templates, the raw bytes of tokens."""
