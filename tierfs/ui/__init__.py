"""A read-only web page of stores: alarms, tiers, checkpoints, differences, files. ``tierfs ui`` serves it.

Every figure comes from the function that the command line calls for it. starlette and uvicorn are needed to serve it.
"""
