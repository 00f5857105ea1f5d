"""`vitascope label`: a local page on which a person labels pictures, and a classifier that learns."""
