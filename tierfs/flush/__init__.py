"""The flusher: the process of a host that moves what was staged down to the durable tiers, and how to talk to it.

One per host and store, started when it is needed and gone when it is not. `tierfs.flush.client` is the way in.
"""
