"""JSON texts that no reader may stumble over: none is what a writer of tierfs wrote."""

import json

from tierfs.errors import TierfsError

VALUES = {
    "null": b"null",
    "true": b"true",
    "negative": b"-1",
    "fraction": b"1.5",
    "Infinity": b"Infinity",
    "NaN": b"NaN",
    "1e999": b"1e999",
    "400-digits": b"9" * 400,
    "5000-digits": b"9" * 5000,
    "text": b'"text"',
    "no-text": b'""',
    "half-a-character": b'"\\ud800"',
    "list": b"[]",
    "object": b"{}",
    "deep": b"[" * 900 + b"]" * 900,
    "deeper": b"[" * 200_000,
    "no-name": b'{"": ["main", 5], "main": ["", 5]}',
    "names": b'{"b": [5, "b"], "c": "text", "d": null}',
}

TEXTS = {
    **VALUES,
    "empty": b"",
    "not-utf-8": b'{"a": "\xff"}',
    "byte-order-mark": b"\xef\xbb\xbf{}",
    "cut": b'{"step": 1',
    "two": b"{}{}",
    "twice": b'{"step": 1, "step": 2}',
}


def altered(document):
    """Yield texts by name: `TEXTS`, and the document with each member, and each one's members, replaced or left out."""
    yield from TEXTS.items()
    for name, member in document.items():
        yield f"{name}-left-out", _text({**document, name: None}, name, None)
        for kind, value in VALUES.items():
            yield f"{name}-{kind}", _text(document, name, value)
        if isinstance(member, dict):
            for inner in member:
                for kind, value in VALUES.items():
                    yield f"{name}.{inner}-{kind}", _text(document, name, _text(member, inner, value))


def _text(document, changed, value):
    """Return the JSON of an object in which a member has another text. ``None`` leaves it out."""
    members = {json.dumps(name).encode(): json.dumps(member).encode() for name, member in document.items()}
    members[json.dumps(changed).encode()] = value
    return b"{" + b", ".join(name + b": " + text for name, text in members.items() if text is not None) + b"}"


def outcomes(decode, document, error=TierfsError):
    """Decode each text of `altered`. Yield its name, and the message of the only kind of error that it may end with."""
    for name, text in altered(document):
        try:
            decode(text)
        except error as raised:
            yield name, str(raised)
        except Exception as raised:
            raise AssertionError(f"{name}: {raised!r:.200}") from raised
        else:
            yield name, ""
