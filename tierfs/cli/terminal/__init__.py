"""Write results to stdout, and progress, log and errors to stderr."""
