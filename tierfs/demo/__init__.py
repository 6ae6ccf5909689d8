"""``tierfs demo``: the training run that is killed and goes on."""
