"""The training run of ``tierfs demo``, which is killed in the middle of a save and resumes."""
