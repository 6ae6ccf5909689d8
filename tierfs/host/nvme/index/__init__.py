"""What the arena holds: the database, and two small files that are read without it."""
