"""The models of Hugging Face's transformers, one file for each."""
