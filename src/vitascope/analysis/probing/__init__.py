"""Probes: classifiers on frozen features, chosen by cross-validation, and the model of the best one."""
