"""Typed messages between processes, their encoding and the sockets they travel on."""
