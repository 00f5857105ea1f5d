"""The text models of CLIP and SigLIP: from words to vectors beside which images are compared."""
