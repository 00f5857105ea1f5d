"""The training tasks: classification and masked patch prediction."""
