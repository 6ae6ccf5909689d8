"""The levels of safety of a save: see docs/reference/levels.md."""

from __future__ import annotations

import enum

from tierfs.errors import InvalidInputError


class Level(enum.IntEnum):
    """How safe a change is. A change that has reached a level has reached all lower ones, too."""

    NONE = 0
    STAGED = 1
    LOCAL = 2
    PEER = 3
    OBJECT = 4

    @property
    def label(self) -> str:
        """The name used in options, on the command line and in ``status``."""
        return self.name.lower()

    @classmethod
    def parse(cls, text: str | Level) -> Level:
        """Return the level with this label, except ``none``. Return a `Level` unchanged.

        Raises:
            InvalidInputError: The text is ``none``, or is not the label of a level.
        """
        if isinstance(text, Level):
            return text
        for level in (cls.STAGED, cls.LOCAL, cls.PEER, cls.OBJECT):
            if level.label == text:
                return level
        raise InvalidInputError(f"{text!r} is not a level: choose 'staged', 'local', 'peer' or 'object'")
