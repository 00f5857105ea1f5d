"""`vitascope learn`: exercises of one equation each, whose answers take the place of ours in the model."""
