"""The detokenizer process: token ids -> text, stop strings."""
