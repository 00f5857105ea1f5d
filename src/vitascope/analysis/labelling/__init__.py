"""From pictures without labels to a classifier: which picture to label next."""
