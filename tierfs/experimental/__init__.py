"""Features that may change or go in any release. Each says when it is promoted to a package of its own, or removed."""
