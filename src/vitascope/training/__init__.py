"""Training: options, the plan, the loop, tasks, checkpoints, evaluation, the run folder."""
