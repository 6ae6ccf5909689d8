"""How safe a save is: the levels, in order (DESIGN, "Words")."""

from __future__ import annotations

import enum

from tierfs.errors import InvalidInputError

__all__ = ["Level"]


class Level(enum.IntEnum):
    """Reaching one level implies the lower ones."""

    NONE = 0
    STAGED = 1
    LOCAL = 2
    OBJECT = 3

    @property
    def label(self) -> str:
        """The name used in options, on the command line and in ``status``."""
        return self.name.lower()

    @classmethod
    def parse(cls, text: str | Level) -> Level:
        """The level called ``text``; one that a save can be asked for.

        Raises:
            InvalidInputError: No such level, or ``none``.
        """
        if isinstance(text, Level):
            return text
        for level in (cls.STAGED, cls.LOCAL, cls.OBJECT):
            if level.label == text:
                return level
        raise InvalidInputError(f"{text!r} is no level: 'staged', 'local' or 'object'")
