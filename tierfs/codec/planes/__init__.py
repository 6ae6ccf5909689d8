"""Byte planes: split, packed, and compressed one by one."""
