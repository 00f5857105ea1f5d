"""A model's page: its weights, its document, and its program of JavaScript in node."""
