"""From logits to tokens. A token is a function of its logits and of (seed, position): neither the batch nor a restart changes it."""
