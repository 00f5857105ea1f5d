"""A trained model in use: prediction, export, the server."""
