"""The nvme tier: chunk files and batches of drafts on a local disk; one writer, many readers."""
