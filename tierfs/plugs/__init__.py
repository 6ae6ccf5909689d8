"""Plugs for training frameworks: one module a framework, imported only with it.

Each module saves through `tierfs.train` or `tierfs.dcp` with the hooks that its framework offers. This package imports
none of them.
"""
