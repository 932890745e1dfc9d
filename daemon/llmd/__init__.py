"""llmd: an LLM server that an operator runs the way they run a database."""

__version__ = "0.1.0"
