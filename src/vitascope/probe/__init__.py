"""Classifiers on frozen features: fit, selection by cross-validation, learning curve, typical images."""
