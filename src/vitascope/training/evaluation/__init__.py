"""Evaluation: one measurement for any engine, on labelled images."""
