"""`vitascope serve`: a model over HTTP, and the page that looks into it."""
