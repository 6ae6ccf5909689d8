"""Copies of a host's pending changes on other hosts: docs/reference/peers.md."""
