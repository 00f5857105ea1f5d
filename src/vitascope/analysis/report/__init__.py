"""The figures and the report of a run."""
