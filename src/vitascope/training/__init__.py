"""Training: recipes, the loop, checkpoints, evaluation."""
