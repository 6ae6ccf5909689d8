"""From a path to verified bytes."""
