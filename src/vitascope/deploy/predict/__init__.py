"""Predictions for one picture or for folders, tables and stores."""
