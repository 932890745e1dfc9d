"""Configuration: one frozen typed truth, and the loader that makes it."""

from llmd.config.server_args import ServerArgs

__all__ = ["ServerArgs"]
