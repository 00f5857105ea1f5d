"""Heatmaps, their faithfulness, and views of learned parts; `vitascope.explain` has the public names."""
