"""The index of the arena: a database, and two small files that processes read without it."""
