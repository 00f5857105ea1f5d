"""A model as one HTML file that computes in the browser."""
