"""The rows of large jobs: parts that are complete or absent, by this process or by Ray."""
