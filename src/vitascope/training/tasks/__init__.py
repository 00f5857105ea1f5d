"""The training tasks: classification, masked patch prediction and masked autoencoders."""
