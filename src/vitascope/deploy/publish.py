"""`push_to_hub`: a model and its card to a repository of the Hugging Face hub."""
