"""Prediction: engines, the predictor, folders of any size."""
